"""Views show whole lines, joined from the pieces in the log: as written, for people, as JSON.

Lines for people have a prefix and are safe for a terminal; equal ones are folded.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from clusterrun.logformat.lines import RECORDS, Gap, LogLine, Speaker, Stream, parse_gap
from clusterrun.logformat.symptoms import Classifier
from clusterrun.logs.dedup import Copies, Dedup, Tracebacks
from clusterrun.logs.text import clock_time, readable, strip_controls, utc_time
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.wording import count

SHOWN_BYTES = 64 * 1024  # of a line for people
WHOLE_BYTES = 1024 * 1024  # of a line for programs; a longer one is passed on in pieces
HELD_BYTES = 64 * 1024 * 1024  # of all unfinished lines; beyond that, pieces are passed on
# The pauses that a line may wait for its end: without a new piece, and in total.
QUIET_PAUSES = 3
OPEN_PAUSES = 9
BAR_PAUSES = 50  # between two states of a progress bar

# BEL ends a control string that the cut left open; it is never shown.
_CUT_MARK = b"\x07" + "…".encode()

_SPREAD_US = 100_000  # between the first and last copy; less is not shown

# Bright black and white are left to the terminal, red to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = "\x1b[31m"
_RESET = "\x1b[0m"
_MARKS = {Stream.ERR: "!", Stream.GAP: "~"}


@dataclass(kw_only=True)
class _Begun:
    """A line that was cut, as far as its pieces have come."""

    first: LogLine
    exact: bool  # False: only the beginning of a long line, without overwritten text
    epoch_us: int = 0  # of the last piece
    text: bytearray = field(default_factory=bytearray)
    size: int = 0  # of the text with what was left out
    pauses: int = 0
    quiet_pauses: int = 0
    is_overwritten: bool = False  # the next text replaces this one: a carriage return came
    is_bar: bool = False

    @property
    def is_due(self) -> bool:
        """Return whether it has waited long enough for its end; a progress bar may wait longer."""
        if self.is_bar:
            return self.pauses > BAR_PAUSES
        return self.quiet_pauses > QUIET_PAUSES or self.pauses > OPEN_PAUSES

    def add(self, piece: LogLine) -> None:
        """Add a piece; text after a carriage return replaces the text before it."""
        self.epoch_us, self.quiet_pauses = piece.epoch_us, 0
        if self.exact:  # nothing is replaced
            self.text += piece.text
            return
        body = piece.text.rstrip(b"\r")  # what overwrites it comes in the next piece
        last_state = body.rpartition(b"\r")[2]
        if len(last_state) < len(body) or (body and self.is_overwritten):
            self.is_bar = True
            self.text.clear()
            self.size = 0
        self.text += last_state[: SHOWN_BYTES - len(self.text)]
        self.size += len(last_state)
        ends_with_return = len(body) < len(piece.text)
        self.is_overwritten = ends_with_return or (self.is_overwritten and not body)

    def line(self, *, ends: bool) -> LogLine:
        """Return what there is as a line; a mark shows that text is hidden or will follow."""
        mark, hidden = b"", self.size - len(self.text)
        if not self.exact and (hidden or not ends):
            mark = _CUT_MARK + (f"[+{hidden:,} bytes]".encode() if hidden else b"")
        text = bytes(self.text) + mark
        return self.first._replace(text=text, partial=not ends, epoch_us=self.epoch_us)


@dataclass(kw_only=True)
class View(ABC):
    """Joins pieces of lines, and calls `write` with the text to show, newlines included.

    A shown line with `partial` has no end yet. For people (`exact` False) an unfinished or long
    line ends with a mark, and a progress bar shows its last state. `exact` drops and adds nothing.
    """

    exact: bool = False
    write: Callable[[bytes], None]
    attempt: int = 0
    _begun: dict[Speaker, _Begun] = field(default_factory=dict)  # unfinished lines
    _held_bytes: int = 0  # of these
    _folders: tuple[Tracebacks | Dedup, ...] = ()  # hold lines until their copies come

    def show(self, line: LogLine) -> None:
        """Take a line or a piece, and write what can be shown now."""
        if line.stream in RECORDS:  # an END record is not shown
            gap = parse_gap(line.text) if line.stream is Stream.GAP else None
            if gap:  # the rest of its unfinished line was lost
                self._show_begun((line.node, line.rank, gap.stream))
                self._show_gap(line, gap)
            return
        source = (line.node, line.rank, line.stream)
        entry = self._begun.get(source)
        if entry is None:
            if not line.partial and (self.exact or len(line.text) <= SHOWN_BYTES):
                self._show_line(line)
                return
            entry = self._begun[source] = _Begun(first=line, exact=self.exact)
        self._held_bytes -= len(entry.text)
        entry.add(line)
        self._held_bytes += len(entry.text)
        is_much = len(entry.text) > WHOLE_BYTES or self._held_bytes > HELD_BYTES
        if is_much or not line.partial:
            self._show_begun(source, ends=not line.partial)

    def _show_begun(self, source: Speaker, *, ends: bool = False) -> None:
        """Show the line that a source has begun, if any."""
        if entry := self._begun.pop(source, None):
            self._held_bytes -= len(entry.text)
            self._show_line(entry.line(ends=ends))

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Take many lines."""
        for line in lines:
            self.show(line)

    def pause(self) -> None:
        """Write what has arrived, and pieces that have waited too long: prompts, progress bars."""
        for source, entry in list(self._begun.items()):
            entry.pauses += 1
            entry.quiet_pauses += 1
            if entry.is_due:
                self._show_begun(source)
        self.write_held()

    def drain(self) -> None:
        """Write everything, including unfinished lines."""
        for source in list(self._begun):
            self._show_begun(source)
        self.write_held()

    def start_attempt(self, attempt: int) -> None:
        """Write what is left of the previous attempt."""
        self.drain()
        self.attempt = attempt

    def write_held(self) -> None:
        """Write the lines that are held for their copies."""
        for folder in self._folders:
            folder.drain()

    @abstractmethod
    def _show_line(self, line: LogLine) -> None:
        """Show a line, or an unfinished piece (`partial`)."""

    @abstractmethod
    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        """Show a record of lost bytes."""


@dataclass(kw_only=True)
class RawView(View):
    """Writes only the bytes of lines, which it never interleaves; `note` reports what was lost."""

    exact: bool = True
    note: Callable[[str], None]

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Write one or more lines or pieces; nearly all are whole."""
        _, nodes, ranks, streams, texts, partials, _ = zip(*lines, strict=True)
        is_whole = True not in partials and RECORDS.isdisjoint(streams)
        if is_whole and self._begun:
            is_whole = self._begun.keys().isdisjoint(zip(nodes, ranks, streams, strict=True))
        if is_whole:
            self.write(b"\n".join(texts) + b"\n")
        else:
            super().show_all(lines)

    def _show_line(self, line: LogLine) -> None:
        self.write(line.text if line.partial else line.text + b"\n")

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self.note(f"{source_name(line)} ~ {gap_sentence(gap)}")


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


def node_colour(node: str) -> int:
    """Return a node's colour, chosen by a hash of its name: the same in every run."""
    return _COLOURS[zlib.crc32(node.encode("utf-8", "surrogateescape")) % len(_COLOURS)]


@dataclass(kw_only=True)
class TextView(View):
    """Writes lines for people; an unfinished line gets a mark."""

    nodes: Iterable[str]  # the longest name, with the highest rank, is as wide as the prefix
    world_size: int
    prefix: bool = True
    colour: bool = False
    time_chars: int = 0  # that are shown of the times; 8: whole seconds, 12: with milliseconds
    dedup: bool = False
    _width: int = 0  # grows only for a longer name that appears later
    _prefixes: dict[Speaker, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folded = Dedup(write=self._print, world_size=self.world_size)
        tracebacks = Tracebacks(take=folded.feed)
        self._folders = (tracebacks, folded)
        self._take = tracebacks.feed if self.dedup else self._print
        for node in self.nodes:
            self._make_room_for(node)

    def unfinished(self) -> str | None:
        """Return the newest unfinished line, without colours or newline; its rest may come."""
        entry = max(reversed(self._begun.values()), key=lambda entry: entry.epoch_us, default=None)
        if entry is None:
            return None
        line = entry.line(ends=True)  # else it gets a mark
        self._make_room_for(line.node)
        prefix = self._new_prefix(source_name(line), line.stream)
        return prefix + readable(line.text, keep_colours=False)

    def _show_line(self, line: LogLine) -> None:
        self._take(line, readable(line.text, keep_colours=self.colour))

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self._take(line, strip_controls(gap_sentence(gap), keep_colours=False))

    def _print(self, line: LogLine, body: str, copies: Copies | None = None) -> None:
        """Write a line or a traceback, for its folded `copies` if there are any."""
        chars = self.time_chars
        start = f"{clock_time(line.epoch_us)[:chars]} " if chars else ""
        if copies:
            label = f"[{count(copies.count, 'node' if line.rank is None else 'rank')}]"
            start += self._new_prefix(label, line.stream, colour=1)  # bold
        else:
            start += self._prefix_of(line)
        texts = body.split("\n")
        if copies and self.prefix:
            texts[-1] += _spread(copies)
        for text in texts:
            self.write(f"{start}{text}\n".encode())

    def _prefix_of(self, line: LogLine) -> str:
        """Return the prefix of a line; that of a source is formatted once."""
        source = (line.node, line.rank, line.stream)
        prefix = self._prefixes.get(source)
        if prefix is None:
            self._make_room_for(line.node)
            name, colour = source_name(line), node_colour(line.node)
            prefix = self._prefixes[source] = self._new_prefix(name, line.stream, colour=colour)
        return prefix

    def _new_prefix(self, who: str, stream: Stream, *, colour: int | None = None) -> str:
        """Format a prefix; `colour` is a number of SGR, None for the unfinished line."""
        if not self.prefix:
            return ""
        mark = _MARKS.get(stream, "|")
        if colour is None or not self.colour:
            return f"{who.ljust(self._width)} {mark} "
        mark = f"{_RED}{mark}{_RESET}" if mark == "!" else mark
        return f"\x1b[{colour}m{who.ljust(self._width)}{_RESET} {mark} "

    def _make_room_for(self, node: str) -> None:
        longest = f"{printable(node)}:{max(self.world_size - 1, 0)}"
        if len(longest) > self._width:
            self._width = len(longest)
            self._prefixes.clear()


def _spread(copies: Copies) -> str:
    took_us = copies.last_us - copies.line.epoch_us
    if took_us < _SPREAD_US:
        return ""
    return f"   (first {source_name(copies.line)}, last +{took_us / 1_000_000:.1f} s)"


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


@dataclass(kw_only=True)
class JsonView(View):
    """Writes one object per line; it names a node's log within the run directory."""

    exact: bool = True
    paths: RunPaths
    procs_per_node: int
    _classifier: Classifier = field(default_factory=Classifier)
    _frames: dict[tuple[int, Speaker], tuple[str, str]] = field(default_factory=dict)

    def _show_line(self, line: LogLine) -> None:
        """Write a line; only what differs between the lines of its source is formatted."""
        source = (self.attempt, (line.node, line.rank, line.stream))
        before, after = self._frames.get(source) or self._new_frame(source)
        time = "null" if not line.epoch_us else f'"{utc_time(line.epoch_us)}"'
        level = '"error"' if self._classifier.classify(source, line.text) else "null"
        text = encode_basestring_ascii(line.text.decode("utf-8", "replace"))
        self.write(
            (
                f'{{"type":"line","ts":{time},{before},"level":{level},'
                f'"text":{text},{after},"offset":{line.offset},'
                f'"partial":{"true" if line.partial else "false"}}}\n'
            ).encode()
        )

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        about = {"type": "gap", "ts": utc_time(line.epoch_us), "node": line.node, "rank": line.rank}
        lost = {"stream": gap.stream.label, "bytes": gap.size_bytes, "reason": gap.reason}
        self.write(to_json({**about, **lost}))

    def _new_frame(self, source: tuple[int, Speaker]) -> tuple[str, str]:
        """Format once the fields that all lines of a source share, to be put between others."""
        attempt, (node, rank, stream) = source
        local_rank = None if rank is None else rank % max(self.procs_per_node, 1)
        who = {"node": node, "rank": rank, "local_rank": local_rank}
        before = {**who, "stream": stream.label, "attempt": attempt}
        after = {"file": str(self.paths.log(attempt, node).relative_to(self.paths.root))}
        # Without `{` and, at the end, `}` and the newline.
        frame = to_json(before).decode()[1:-2], to_json(after).decode()[1:-2]
        self._frames[source] = frame
        return frame
