"""What the views of log lines share: they show whole lines, joined from the pieces in the log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from clusterrun.logformat.lines import RECORDS, Gap, LogLine, Stream, parse_gap
from clusterrun.logs.dedup import Dedup
from clusterrun.logs.joining import Joiner
from clusterrun.logs.tracebacks import Tracebacks


class View(ABC):
    """Calls `write` with what is to be shown, newlines included."""

    def __init__(self, write: Callable[[bytes], None], joiner: Joiner, attempt: int = 0) -> None:
        self._put, self._joiner, self._attempt = write, joiner, attempt
        self._folders: tuple[Tracebacks | Dedup, ...] = ()  # hold lines back for their copies

    def show(self, line: LogLine) -> None:
        """Take a line or a piece; what can be shown now is written."""
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
        """Write what has come, and pieces that have waited long for their end."""
        self._show_joined(self._joiner.pause())
        self.write_held()

    def drain(self) -> None:
        """Write all, also lines that have no end yet."""
        self._show_joined(self._joiner.drain())
        self.write_held()

    def start_attempt(self, attempt: int) -> None:
        """Write all that is left of the attempt before."""
        self.drain()
        self._attempt = attempt

    def write_held(self) -> None:
        """Write the lines that wait for their copies."""
        for folder in self._folders:
            folder.drain()

    def _show_joined(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self._show_line(line)

    @abstractmethod
    def _show_line(self, line: LogLine) -> None:
        """Show a line, or a piece (`partial`) whose end has not come."""

    @abstractmethod
    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        """Show that bytes were lost."""
