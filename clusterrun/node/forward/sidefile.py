"""The side file of a node's log: its error lines, so that readers need not read the log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clusterrun.logformat.lines import (
    OF_NO_RANK,
    SIDE_TEXT_BYTES,
    SideEntry,
    Stream,
    left_out_text,
    line_head,
    side_text,
)
from clusterrun.logformat.symptoms import ERROR, Classifier, may_hold_errors
from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.stamp import Piece, whole_characters

FILE_BYTES = 200_000
SEVERE_BYTES = 50_000  # of these, reserved for severe lines
REPEATS = 20
HEAD_BYTES = 64  # of a record, at most
RECORD_S = 5  # between two records of left-out lines
_DIGITS = b"0123456789"


class _Place(NamedTuple):
    """When and by whom a line was written, and where in the log it is."""

    time_us: int
    rank: str
    stream: str
    offset: int


@dataclass(kw_only=True)
class _Line:
    """A line to keep: its kind, and how many more bytes of it to keep."""

    kind: str
    room: int
    is_open: bool = False  # its text here is marked as cut


class SideFile:
    """Keep error lines and those of launcher and agent, up to a size; count those left out."""

    def __init__(self, path: Path) -> None:
        self.file = AppendedFile(path)
        self._classifier = Classifier()
        self._size = 0
        self._times: dict[tuple[str, bytes], int] = {}
        self._begun: dict[tuple[str, str], _Line] = {}  # unfinished lines to keep
        self._left_out = self._recorded = 0
        self._recorded_us = 0

    def add(self, piece: Piece, time_us: int, rank: str, stream: str, offset: int) -> None:
        """Add the lines to keep; `offset` is the offset in the log of the first line of `piece`."""
        source = (rank, stream)
        is_inside = source in self._begun or self._classifier.is_in_traceback(source)
        if rank != "-" and not is_inside and not may_hold_errors(piece.text):
            return
        head_bytes = len(line_head(time_us, rank, stream))
        for text in [piece.text] if piece.is_cut else piece.text.split(b"\n")[:-1]:
            line = self._begun.pop(source, None) or self._begin(source, text)
            if line is not None:
                self._go_on(line, _Place(time_us, *source, offset), text, is_cut=piece.is_cut)
            offset += head_bytes + len(text) + 1

    def _begin(self, source: tuple[str, str], text: bytes) -> _Line | None:
        """Decide whether to keep a line, or its beginning."""
        rank = source[0]
        kind = self._classifier.classify(source, text)
        if not kind and rank != "-":
            return None
        is_taken = self._has_room(rank, kind, text[:SIDE_TEXT_BYTES])
        return _Line(kind=kind, room=SIDE_TEXT_BYTES if is_taken else 0)

    def _go_on(self, line: _Line, place: _Place, text: bytes, *, is_cut: bool) -> None:
        """Add more of a line; its last record marks its end, so that readers stop joining."""
        if line.room:
            is_end = not is_cut or len(text) >= line.room
            has_more = len(text) > line.room or (is_cut and is_end)
            if len(text) > line.room:
                text = text[: whole_characters(text, line.room)]
            if not self._fits(line.kind, len(text)):
                text, is_end, has_more = b"", True, True
            line.room = 0 if is_end else line.room - len(text)
            self._write(place, line.kind, text, is_cut=not is_end, has_more=has_more)
            line.is_open = line.room > 0
        if is_cut:
            self._begun[place.rank, place.stream] = line

    def _has_room(self, rank: str, kind: str, text: bytes) -> bool:
        """Return whether to keep a new line; count it if not."""
        key = (rank, text.translate(None, _DIGITS))
        times = self._times.get(key, 0)
        if times >= REPEATS or not self._fits(kind, len(text)):
            self._left_out += 1
            return False
        self._times[key] = times + 1
        return True

    def _fits(self, kind: str, text_bytes: int) -> bool:
        """Return whether there is room, including for the ends of unfinished lines."""
        room = FILE_BYTES - (SEVERE_BYTES if kind in ("", ERROR) else 0)
        ends = (1 + sum(line.is_open for line in self._begun.values())) * HEAD_BYTES
        return self._size + HEAD_BYTES + text_bytes + ends <= room

    def _write(
        self, place: _Place, kind: str, text: bytes, *, is_cut: bool = False, has_more: bool = False
    ) -> None:
        stream = place.stream.upper() if is_cut else place.stream
        head = line_head(place.time_us, place.rank, stream)
        line = head + side_text(SideEntry(kind, has_more, place.offset, text)) + b"\n"
        self._size += len(line)
        self.file.add(line)

    def add_gap(self, time_us: int, rank: str, stream: str, text: bytes, offset: int) -> None:
        """Add a record of lost bytes, as one of a rank's lines; it ends a cut line."""
        line = self._begun.pop((rank, stream), None)
        if self._has_room(rank, "", text):
            self._write(_Place(time_us, rank, Stream.GAP.value, offset), "", text)
        elif line is not None and line.is_open:
            self._write(_Place(time_us, rank, stream, offset), line.kind, b"")

    def add_end(self, time_us: int, text: bytes, offset: int) -> None:
        """Add the last record, after the last count of left-out lines."""
        self._record_left_out(time_us, offset)
        self._write(_Place(time_us, OF_NO_RANK, Stream.END.value, offset), "", text)

    def record_left_out(self, time_us: int, offset: int) -> None:
        """Record the number of left-out lines when it has grown by a tenth, to keep records few."""
        is_time = time_us - self._recorded_us >= RECORD_S * 1_000_000
        if is_time and self._left_out * 10 >= self._recorded * 11:
            self._record_left_out(time_us, offset)

    def _record_left_out(self, time_us: int, offset: int) -> None:
        if self._left_out > self._recorded:
            place = _Place(time_us, OF_NO_RANK, Stream.GAP.value, offset)
            self._write(place, "", left_out_text(self._left_out))
            self._recorded, self._recorded_us = self._left_out, time_us
