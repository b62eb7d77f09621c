"""Join the pieces of cut lines, separately for each rank and stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from clusterrun.logformat.lines import LogLine, Stream

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
    """A cut line: its bytes so far, and the time of its last piece."""

    first: LogLine
    epoch_us: int = 0
    text: bytearray = field(default_factory=bytearray)
    pauses: int = 0
    quiet_pauses: int = 0

    @property
    def is_due(self) -> bool:
        """Return whether it has waited long enough for its end."""
        return self.quiet_pauses > QUIET_PAUSES or self.pauses > OPEN_PAUSES

    def add(self, text: bytes) -> None:
        self.text += text

    def line(self, *, ends: bool) -> LogLine:
        text = bytes(self.text) + self._mark(ends=ends)
        return self.first._replace(text=text, partial=not ends, epoch_us=self.epoch_us)

    def _mark(self, *, ends: bool) -> bytes:
        return b""


@dataclass(kw_only=True)
class _Shown(_Open):
    """A line for people: only the beginning if it is long, without overwritten text."""

    size: int = 0
    returned: bool = False
    is_bar: bool = False

    @property
    def is_due(self) -> bool:
        """Return whether it has waited long enough; a progress bar may wait longer."""
        return self.pauses > BAR_PAUSES if self.is_bar else super().is_due

    def add(self, text: bytes) -> None:
        body = text.rstrip(b"\r")
        kept_from = body.rfind(b"\r") + 1
        if kept_from or (body and self.returned):
            self.is_bar = True
            self.text.clear()
            self.size = 0
        self.text += body[kept_from:][: SHOWN_BYTES - len(self.text)]
        self.size += len(body) - kept_from
        self.returned = len(body) < len(text) or (self.returned and not body)

    def _mark(self, *, ends: bool) -> bytes:
        hidden = self.size - len(self.text)
        return _MARK + f"[+{hidden:,} bytes]".encode() if hidden else b"" if ends else _MARK


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
            entry = self.begun[source] = _Open(first=line) if self.exact else _Shown(first=line)
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
