"""The side file of a node's log: its error lines, so that nobody need read the log for them."""

from __future__ import annotations

from pathlib import Path

from clusterrun.node.appended import AppendedFile
from clusterrun.node.stamp import Piece, line_head, whole_characters
from clusterrun.symptoms import Classifier, may_hold_errors

FILE_BYTES = 200_000
SEVERE_BYTES = 50_000  # of them, for severe lines alone
SEVERE = frozenset({"traceback", "exception", "oom", "nccl", "cuda", "signal"})
REPEATS = 20
TEXT_BYTES = 4096  # of a line
TELLING_S = 5
_DIGITS = b"0123456789"


class SideFile:
    """Error lines, and what launcher and agent said; bounded, what is left out is counted."""

    def __init__(self, path: Path) -> None:
        self.file = AppendedFile(path)
        self._classifier = Classifier()
        self._size = 0
        self._times: dict[tuple[str, bytes], int] = {}
        self._left_out = self._told = 0
        self._told_us = 0

    def add(self, piece: Piece, time_us: int, rank: str, stream: str, offset: int) -> None:
        """Take those lines that belong here; `offset` is the place of the first in the log."""
        source = (rank, stream)
        is_ours = rank == "-"
        is_open = is_ours or self._classifier.is_in_traceback(source)
        if not is_open and not may_hold_errors(piece.text):
            return
        head = line_head(time_us, rank, stream.upper() if piece.is_cut else stream)
        lines = [piece.text] if piece.is_cut else piece.text.split(b"\n")[:-1]
        for line in lines:
            kind = "" if stream == "a" else self._classifier.classify(source, line)
            if kind or is_ours:
                self._add_line(head, rank, kind or "-", offset, line)
            offset += len(head) + len(line) + 1

    def _add_line(self, head: bytes, rank: str, kind: str, offset: int, text: bytes) -> None:
        if len(text) > TEXT_BYTES:
            text = text[: whole_characters(text, TEXT_BYTES)]
        key = (rank, text.translate(None, _DIGITS))
        times = self._times.get(key, 0)
        line = head + b"%s %d %s\n" % (kind.encode(), offset, text)
        room = FILE_BYTES - (0 if kind in SEVERE else SEVERE_BYTES)
        if times >= REPEATS or self._size + len(line) > room:
            self._left_out += 1
            return
        self._times[key] = times + 1
        self._size += len(line)
        self.file.add(line)

    def add_gap(self, time_us: int, rank: str, text: bytes, offset: int) -> None:
        """Take the record of bytes that were lost, as one of a rank's lines."""
        self._add_line(line_head(time_us, rank, "g"), rank, "-", offset, text)

    def add_end(self, time_us: int, text: bytes, offset: int) -> None:
        """Take the last record, behind the last word on what was left out."""
        self._tell(time_us, offset)
        self.file.add(line_head(time_us, "-", "z") + b"- %d %s\n" % (offset, text))

    def tell(self, time_us: int, offset: int) -> None:
        """Say how many lines were left out, if that is news.

        Only where they became a tenth more, so that these records stay few in a month, too.
        """
        is_time = time_us - self._told_us >= TELLING_S * 1_000_000
        if is_time and self._left_out * 10 >= self._told * 11:
            self._tell(time_us, offset)

    def _tell(self, time_us: int, offset: int) -> None:
        if self._left_out > self._told:
            text = b"- %d x %d repeated, or more than this file may hold\n"
            self.file.add(line_head(time_us, "-", "g") + text % (offset, self._left_out))
            self._told, self._told_us = self._left_out, time_us
