"""A node's log with its side file of error lines, so that readers need not read all of the log.

They are written together, in that order.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clusterrun.logformat.lines import (
    LEFT_OUT_TEXT,
    OF_NO_RANK,
    SIDE_TEXT_BYTES,
    SideEntry,
    Stream,
    end_text,
    gap_text,
    line_head,
    side_text,
)
from clusterrun.logformat.symptoms import ERROR, Classifier, may_hold_errors
from clusterrun.node.forward.spool import Loss, Piece, whole_characters
from clusterrun.shared.files import size_of

BUFFER_BYTES = 1 << 20
FILE_BYTES = 200_000
SEVERE_BYTES = 50_000  # of these, reserved for severe lines
REPEATS = 20
HEAD_BYTES = 64  # of a record, at most
_DIGITS = b"0123456789"


class AppendedFile:
    """Append to a file whose disk may be full for a while; keep what can't be written yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._waiting = bytearray()
        self.problem = ""

    @property
    def pending_bytes(self) -> int:
        """How many bytes wait in memory."""
        return len(self._waiting)

    def add(self, data: bytes) -> None:
        """Queue data for the next flush."""
        self._waiting += data

    def flush(self, *, creates: bool = False) -> bool:
        """Write pending data; return whether all was written. `creates` makes an empty file too."""
        must_open = creates and self._descriptor is None
        if not self._waiting and not must_open:
            return True
        try:
            file = self._open()
            while self._waiting:
                del self._waiting[: os.write(file, self._waiting)]
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.close()
        return not self._waiting

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def close(self) -> None:
        """Close the file; the next flush opens it again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class NodeLog:
    """The log of one node and one attempt; its times never decrease."""

    def __init__(self, log: Path, errors: Path) -> None:
        self._log, self._errors = AppendedFile(log), SideFile(errors)
        self.files = (self._log, self._errors.file)
        self._offset = size_of(log)
        self._time_us = 0

    @property
    def pending_bytes(self) -> int:
        """How many bytes of the log wait in memory."""
        return self._log.pending_bytes

    @property
    def problem(self) -> str:
        """Why the log can't be written; "" if it can."""
        return self._log.problem

    def add(self, piece: Piece, time_us: int, rank: str, stream: str) -> None:
        """Add a piece of a stream."""
        time_us = self._time_us = max(time_us, self._time_us)
        self._errors.add(piece, time_us, rank, stream, self._offset)
        self._append(stamp(piece, time_us, rank, stream))

    def add_gap(self, loss: Loss, time_us: int, rank: str, stream: str) -> None:
        """Record that bytes of a stream were lost here."""
        time_us = self._time_us = max(time_us, self._time_us)
        text = gap_text(stream, loss.size, loss.reason)
        self._errors.add_gap(time_us, rank, stream, text, self._offset)
        self._append(line_head(time_us, rank, Stream.GAP.value) + text + b"\n")

    def add_end(self, code: int, reason: str, time_us: int) -> None:
        """Add the last line."""
        time_us = self._time_us = max(time_us, self._time_us)
        text = end_text(code, reason)
        self._errors.add_end(time_us, text, self._offset)
        self._append(line_head(time_us, OF_NO_RANK, Stream.END.value) + text + b"\n")

    def _append(self, lines: bytes) -> None:
        self._log.add(lines)
        self._offset += len(lines)
        if self.pending_bytes >= BUFFER_BYTES:
            self._log.flush()

    def flush(self) -> bool:
        """Write pending data of the log, then of the side file; return whether the log was written.

        A log has a side file even if that is empty, so that readers need not search the log.
        """
        if not self._log.flush():
            return False  # the side file must not point beyond the log
        self._errors.note_missing_lines(self._time_us, self._offset)
        self._errors.file.flush(creates=self._offset > 0)
        return True  # what the side file still lacks waits for the next flush


class SideFile:
    """Keep error lines and those of launcher and agent, up to a size; record if some are left out.

    Of a line that was cut, only the first piece is kept; readers find more of it in the log.
    """

    def __init__(self, path: Path) -> None:
        self.file = AppendedFile(path)
        self._classifier = Classifier()
        self._size = 0
        self._repeats: dict[tuple[str, bytes], int] = {}
        self._cut: set[tuple[str, str]] = set()  # whose next piece continues an error line
        self._lacks_some = self._has_recorded = False  # left lines out; has a record of that

    def add(self, piece: Piece, time_us: int, rank: str, stream: str, offset: int) -> None:
        """Add the lines to keep; `offset` is the offset in the log of the first line of `piece`."""
        source = (rank, stream)
        is_inside = source in self._cut or self._classifier.is_in_traceback(source)
        if rank != OF_NO_RANK and not is_inside and not may_hold_errors(piece.text):
            return  # it has no line to keep
        head = line_head(time_us, rank, stream)
        for text in [piece.text] if piece.is_cut else piece.text.split(b"\n")[:-1]:
            if source not in self._cut:
                self._add_line(source, head, text, offset, is_cut=piece.is_cut)
            elif not piece.is_cut:  # the end of a line that was cut
                self._cut.discard(source)
            offset += len(head) + len(text) + 1

    def _add_line(
        self, source: tuple[str, str], head: bytes, text: bytes, offset: int, *, is_cut: bool
    ) -> None:
        """Keep an error line, or any line that no rank wrote; of a cut one, the rest is skipped."""
        if not (kind := self._classifier.classify(source, text)) and source[0] != OF_NO_RANK:
            return
        if is_cut:
            self._cut.add(source)
        shown = text[: whole_characters(text, min(len(text), SIDE_TEXT_BYTES))]
        if self._take_room(source[0], kind, shown):
            self._write(head, SideEntry(kind, is_cut or len(shown) < len(text), offset, shown))

    def _take_room(self, rank: str, kind: str, text: bytes) -> bool:
        """Count a line that is to be kept, and return True; without room for it, return False."""
        key = (rank, text.translate(None, _DIGITS))  # the same if only digits differ
        times = self._repeats.get(key, 0)
        limit = FILE_BYTES - (SEVERE_BYTES if kind in ("", ERROR) else 0)  # for others
        if times >= REPEATS or self._size + 2 * HEAD_BYTES + len(text) > limit:  # head and fields
            self._lacks_some = True
            return False
        self._repeats[key] = times + 1
        return True

    def _write(self, head: bytes, entry: SideEntry) -> None:
        line = head + side_text(entry) + b"\n"
        self._size += len(line)
        self.file.add(line)

    def _note(self, head: bytes, text: bytes, offset: int) -> None:
        self._write(head, SideEntry("", has_more=False, offset=offset, text=text))

    def add_gap(self, time_us: int, rank: str, stream: str, text: bytes, offset: int) -> None:
        """Add a record of lost bytes, as one of a rank's lines; it ends a cut line."""
        self._cut.discard((rank, stream))
        if self._take_room(rank, "", text):
            self._note(line_head(time_us, rank, Stream.GAP.value), text, offset)

    def add_end(self, time_us: int, text: bytes, offset: int) -> None:
        """Add the last record, after that of left-out lines."""
        self.note_missing_lines(time_us, offset)
        self._note(line_head(time_us, OF_NO_RANK, Stream.END.value), text, offset)

    def note_missing_lines(self, time_us: int, offset: int) -> None:
        """Record once, if lines have been left out, that some are missing."""
        if self._lacks_some and not self._has_recorded:
            self._has_recorded = True
            self._note(line_head(time_us, OF_NO_RANK, Stream.GAP.value), LEFT_OUT_TEXT, offset)


def stamp(piece: Piece, time_us: int, rank: str, stream: str) -> bytes:
    """Return the lines of a piece with their heads."""
    if piece.is_cut:
        return line_head(time_us, rank, stream.upper()) + piece.text + b"\n"
    head = line_head(time_us, rank, stream)
    # A head follows each newline, also the last one.
    return (head + piece.text.replace(b"\n", b"\n" + head)).removesuffix(head)
