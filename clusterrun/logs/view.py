"""Views show whole lines, joined from the pieces in the log: the base, and bytes as written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from clusterrun.logformat.lines import RECORDS, Gap, LogLine, Stream, parse_gap
from clusterrun.logs.dedup import Dedup, Tracebacks
from clusterrun.logs.text import strip_controls

SHOWN_BYTES = 64 * 1024  # of a line for people
WHOLE_BYTES = 1024 * 1024  # of a line for programs; a longer one is passed on in pieces
HELD_BYTES = 64 * 1024 * 1024  # of all unfinished lines; beyond that, pieces are passed on
# The pauses that a line may wait for its end: without a new piece, and in total.
QUIET_PAUSES = 3
OPEN_PAUSES = 9
BAR_PAUSES = 50  # between two states of a progress bar

# BEL ends a control string that the cut left open; it is never shown.
_MARK = b"\x07" + "…".encode()


@dataclass(kw_only=True)
class _Open:
    """A cut line and the time of its last piece.

    If it is not `exact`, it has only the beginning of a long line, without overwritten text.
    """

    first: LogLine
    exact: bool
    epoch_us: int = 0
    text: bytearray = field(default_factory=bytearray)
    size: int = 0
    pauses: int = 0
    quiet_pauses: int = 0
    returned: bool = False
    is_bar: bool = False

    @property
    def is_due(self) -> bool:
        """Return whether it has waited long enough for its end; a progress bar may wait longer."""
        if self.is_bar:
            return self.pauses > BAR_PAUSES
        return self.quiet_pauses > QUIET_PAUSES or self.pauses > OPEN_PAUSES

    def add(self, text: bytes) -> None:
        if self.exact:
            self.text += text
            return
        body = text.rstrip(b"\r")
        kept_from = body.rfind(b"\r") + 1
        if kept_from or (body and self.returned):
            self.is_bar = True
            self.text.clear()
            self.size = 0
        self.text += body[kept_from:][: SHOWN_BYTES - len(self.text)]
        self.size += len(body) - kept_from
        self.returned = len(body) < len(text) or (self.returned and not body)

    def line(self, *, ends: bool) -> LogLine:
        hidden = 0 if self.exact else self.size - len(self.text)
        mark = b"" if ends or self.exact else _MARK
        mark = _MARK + f"[+{hidden:,} bytes]".encode() if hidden else mark
        text = bytes(self.text) + mark
        return self.first._replace(text=text, partial=not ends, epoch_us=self.epoch_us)


@dataclass(kw_only=True)
class Joiner:
    """Turns lines and pieces of lines into whole lines.

    `begun` holds unfinished lines, at most `most_held` bytes. A returned line with `partial` has no
    end yet. For people (`exact` False) an unfinished or long line ends with a mark, and a progress
    bar shows its last state. `exact` drops and adds nothing.
    """

    exact: bool = False
    most_held: int = HELD_BYTES
    begun: dict[tuple[str, int | None, Stream], _Open] = field(default_factory=dict)
    _held_bytes: int = 0

    def feed(self, line: LogLine) -> LogLine | None:
        """Return the line that this piece completes, or a piece that can't wait; else None."""
        source = (line.node, line.rank, line.stream)
        entry = self.begun.get(source)
        if entry is None:
            if not line.partial and (self.exact or len(line.text) <= SHOWN_BYTES):
                return line
            entry = self.begun[source] = _Open(first=line, exact=self.exact)
        self._held_bytes -= len(entry.text)
        entry.add(line.text)
        entry.epoch_us = line.epoch_us
        entry.quiet_pauses = 0
        self._held_bytes += len(entry.text)
        if line.partial and len(entry.text) <= WHOLE_BYTES and self._held_bytes <= self.most_held:
            return None
        return self._take(source, ends=not line.partial)

    def cut_off(self, node: str, rank: int | None, stream: Stream) -> Iterator[LogLine]:
        """Yield the unfinished line of a source, whose rest was lost."""
        source = (node, rank, stream)
        if source in self.begun:
            yield self._take(source, ends=False)

    def pause(self) -> Iterator[LogLine]:
        """Yield the lines that have waited too long for their end: prompts, progress bars."""
        for source, entry in list(self.begun.items()):
            entry.pauses += 1
            entry.quiet_pauses += 1
            if entry.is_due:
                yield self._take(source, ends=False)

    def drain(self) -> Iterator[LogLine]:
        """Yield every unfinished line."""
        yield from (self._take(source, ends=False) for source in list(self.begun))

    def unfinished(self) -> LogLine | None:
        """Return the newest unfinished line as it is, and keep waiting for the rest."""
        entry = max(reversed(self.begun.values()), key=lambda entry: entry.epoch_us, default=None)
        return entry.line(ends=True) if entry else None

    def _take(self, source: tuple[str, int | None, Stream], *, ends: bool) -> LogLine:
        entry = self.begun.pop(source)
        self._held_bytes -= len(entry.text)
        return entry.line(ends=ends)


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

    Lines of several sources are never interleaved.
    `note` reports what was lost: stdout is for the bytes only.
    """

    def __init__(self, *, write: Callable[[bytes], None], note: Callable[[str], None]) -> None:
        super().__init__(write, Joiner(exact=True))
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
