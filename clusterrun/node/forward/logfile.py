"""A node's log with its side file of errors: written together, in that order."""

from __future__ import annotations

from pathlib import Path

from clusterrun.logformat.lines import OF_NO_RANK, Stream, end_text, gap_text, line_head
from clusterrun.node.forward.appended import AppendedFile
from clusterrun.node.forward.sidefile import SideFile
from clusterrun.node.forward.stamp import Loss, Piece, stamp
from clusterrun.shared.files import size_of

BUFFER_BYTES = 1 << 20


class NodeLog:
    """The log of one node and one attempt; its times never decrease."""

    def __init__(self, log: Path, errors: Path) -> None:
        self._log, self._errors = AppendedFile(log), SideFile(errors)
        self._files = (self._log, self._errors.file)
        self._offset = size_of(log)
        self._time_us = 0

    @property
    def pending_bytes(self) -> int:
        """How many bytes of the log wait in memory."""
        return self._log.pending_bytes

    @property
    def is_written(self) -> bool:
        """Return whether everything has reached the run directory."""
        return not any(file.pending_bytes for file in self._files)

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
        """Write pending data: the log first, then the side file, which points into it.

        A log has a side file even if that is empty, so that readers need not search the log.
        """
        if not self._log.flush():
            return False
        self._errors.record_left_out(self._time_us, self._offset)
        self._errors.file.flush(creates=self._offset > 0)
        return True

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
