"""Views show whole lines, joined from the pieces in the log: the base, and bytes as written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from clusterrun.logformat.lines import RECORDS, Gap, LogLine, Stream, parse_gap
from clusterrun.logs.dedup import Dedup, Tracebacks
from clusterrun.logs.joining import HELD_BYTES, Joiner
from clusterrun.logs.text import strip_controls


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


class RawView(View):
    """Writes the bytes of lines, in order for every rank and stream.

    Lines of several sources are never interleaved; a single source is passed on piece by piece.
    `note` reports what was lost: stdout is for the bytes only.
    """

    def __init__(
        self, *, write: Callable[[bytes], None], note: Callable[[str], None], one_source: bool
    ) -> None:
        super().__init__(write, Joiner(exact=True, most_held=0 if one_source else HELD_BYTES))
        self._note = note

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Write many lines or pieces; nearly all are whole."""
        _, nodes, ranks, streams, texts, partials, _ = zip(*lines, strict=True)
        is_whole = True not in partials and RECORDS.isdisjoint(streams)
        if is_whole and self._joiner.begun:
            is_whole = self._joiner.begun.keys().isdisjoint(zip(nodes, ranks, streams, strict=True))
        if is_whole:
            self._put(b"\n".join(texts) + b"\n")
        else:
            super().show_all(lines)

    def _show_line(self, line: LogLine) -> None:
        self._put(line.text if line.partial else line.text + b"\n")

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self._note(f"{source_name(line)} ~ {gap_sentence(gap)}")


def source_name(line: LogLine) -> str:
    """Return who wrote a line: `node:rank`, or only the node for launcher and agent."""
    node = printable(line.node)
    return node if line.rank is None else f"{node}:{line.rank}"


def gap_sentence(gap: Gap) -> str:
    """Return the line to show in place of lost bytes."""
    name = {Stream.OUT: "stdout", Stream.ERR: "stderr"}.get(gap.stream, "output")
    why = f": {gap.reason}" if gap.reason else ""
    return f"{gap.size_bytes:,} bytes of {name} lost{why}"


def printable(name: str) -> str:
    """Return a name without what could move a cursor."""
    return strip_controls(name.encode("utf-8", "replace").decode(), keep_colours=False)
