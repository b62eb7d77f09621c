"""The base of all views: they show whole lines, joined from the pieces in the log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from clusterrun.logformat.lines import RECORDS, Gap, LogLine, Stream, parse_gap
from clusterrun.logs.dedup import Dedup
from clusterrun.logs.joining import Joiner
from clusterrun.logs.tracebacks import Tracebacks


class View(ABC):
    """Calls `write` with the text to show, newlines included."""

    def __init__(self, write: Callable[[bytes], None], joiner: Joiner, attempt: int = 0) -> None:
        self._put, self._joiner, self._attempt = write, joiner, attempt
        self._folders: tuple[Tracebacks | Dedup, ...] = ()  # hold lines until their copies come

    def show(self, line: LogLine) -> None:
        """Take a line or a piece, and write what can be shown now."""
        if line.stream in RECORDS:
            gap = parse_gap(line.text) if line.stream is Stream.GAP else None
            if gap:
                self._show_joined(self._joiner.cut_off(line.node, line.rank, gap.stream))
                self._show_gap(line, gap)
            return
        whole = self._joiner.feed(line)
        if whole is not None:
            self._show_line(whole)

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Take many lines."""
        for line in lines:
            self.show(line)

    def pause(self) -> None:
        """Write what has arrived, and pieces that have waited too long for their end."""
        self._show_joined(self._joiner.pause())
        self.write_held()

    def drain(self) -> None:
        """Write everything, including unfinished lines."""
        self._show_joined(self._joiner.drain())
        self.write_held()

    def start_attempt(self, attempt: int) -> None:
        """Write what is left of the previous attempt."""
        self.drain()
        self._attempt = attempt

    def write_held(self) -> None:
        """Write the lines that are held for their copies."""
        for folder in self._folders:
            folder.drain()

    def _show_joined(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self._show_line(line)

    @abstractmethod
    def _show_line(self, line: LogLine) -> None:
        """Show a line, or an unfinished piece (`partial`)."""

    @abstractmethod
    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        """Show a record of lost bytes."""
