"""Log lines as people read them, and as programs do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from clusterrun.logs.lines import LogLine, Stream

SHOWN_BYTES = 64 * 1024
# How many pauses of a follower a line may wait for its end, when nothing comes and when more does.
QUIET_PAUSES = 3
OPEN_PAUSES = 9

# Bright black and white are left to the terminal, red to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = "\x1b[31m"
_RESET = "\x1b[0m"

# ECMA-48: control strings (with or without their end), control sequences, other escapes;
# then what is left of the C0 and C1 sets, but for the tab.
_CONTROL = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?P<sgr>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


def strip_controls(text: str, *, keep_colours: bool) -> str:
    """Take out all that could move a terminal's cursor, rename it or answer from it.

    Colours and the like (SGR) stay where they are wanted, and end with the line.

    >>> strip_controls("a\\x1b[2Jb\\x1b]0;title\\x07c", keep_colours=True)
    'abc'
    """
    if not keep_colours:
        return _CONTROL.sub("", text)
    kept = _CONTROL.sub(lambda match: match["sgr"] or "", text)
    return kept + _RESET if "\x1b[" in kept else kept


def last_state(text: str) -> str:
    """Reduce a progress bar to what stood there last: what follows the last carriage return."""
    return text.rstrip("\r").rpartition("\r")[2]


def node_colour(node: str) -> int:
    """Choose a node's colour by a hash of its name (FNV-1a), the same in every run."""
    value = 2166136261
    for byte in node.encode("utf-8", "surrogateescape"):
        value = ((value ^ byte) * 16777619) % 2**32
    return _COLOURS[value % len(_COLOURS)]


@dataclass(kw_only=True)
class _Open:
    """A line that was cut, as far as it has come.

    Of a long one the beginning is kept, of a progress bar what no carriage return overwrote.
    """

    line: LogLine
    text: bytearray = field(default_factory=bytearray)
    size: int = 0
    pauses: int = 0
    quiet_pauses: int = 0

    def add(self, text: bytes) -> None:
        body = text.rstrip(b"\r")
        overwrites = body.rfind(b"\r")
        if overwrites >= 0 or (body and self.text.endswith(b"\r")):
            self.text.clear()
            self.size = 0
            text = text[overwrites + 1 :]
        self.text += text[: max(SHOWN_BYTES - len(self.text), 0)]
        self.size += len(text)
        self.quiet_pauses = 0


@dataclass(kw_only=True)
class TextView:
    """Lines with a prefix that says who wrote them; cut lines are joined again.

    The prefix is as wide as the longest name in `nodes` with the highest rank; only a longer name
    that comes later makes it wider.
    """

    nodes: InitVar[Iterable[str]]
    world_size: int
    colour: bool = False
    timestamps: bool = False
    prefix: bool = True
    _width: int = 0
    _open: dict[tuple[str, int | None, Stream], _Open] = field(default_factory=dict)

    def __post_init__(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._make_room_for(node)

    def show(self, line: LogLine) -> Iterator[str]:
        """Yield what can be shown now that this line has come: itself, or nothing yet."""
        source = (line.node, line.rank, line.stream)
        if line.partial or source in self._open:
            entry = self._open.setdefault(source, _Open(line=line))
            entry.add(line.text)
            if line.partial:
                return
            del self._open[source]
        else:
            entry = _Open(line=line)
            entry.add(line.text)
        yield self._written(entry, ends=True)

    def pause(self) -> Iterator[str]:
        """Yield what has waited for its end for long, with a mark: prompts, progress bars."""
        for source, entry in list(self._open.items()):
            entry.pauses += 1
            entry.quiet_pauses += 1
            if entry.quiet_pauses > QUIET_PAUSES or entry.pauses > OPEN_PAUSES:
                del self._open[source]
                yield self._written(entry, ends=False)

    def drain(self) -> Iterator[str]:
        """Yield every line that has no end yet, with a mark."""
        entries = list(self._open.values())
        self._open.clear()
        yield from (self._written(entry, ends=False) for entry in entries)

    def _written(self, entry: _Open, *, ends: bool) -> str:
        text = last_state(bytes(entry.text).decode("utf-8", "replace"))
        text = strip_controls(text, keep_colours=self.colour)
        hidden = entry.size - len(entry.text)
        if hidden:
            text += f"…[+{hidden:,} bytes]"
        elif not ends:
            text += "…"
        return f"{self._head(entry.line)}{text}\n"

    def _head(self, line: LogLine) -> str:
        stamp = f"{clock_time(line.epoch_us)} " if self.timestamps else ""
        if not self.prefix:
            return stamp
        self._make_room_for(line.node)
        who = strip_controls(source_name(line), keep_colours=False).ljust(self._width)
        mark = "!" if line.stream is Stream.ERR else "|"
        if self.colour:
            who = f"\x1b[{node_colour(line.node)}m{who}{_RESET}"
            mark = f"{_RED}{mark}{_RESET}" if mark == "!" else mark
        return f"{stamp}{who} {mark} "

    def _make_room_for(self, node: str) -> None:
        self._width = max(self._width, len(f"{node}:{max(self.world_size - 1, 0)}"))


def source_name(line: LogLine) -> str:
    """Name who wrote a line: `node:rank`, or the node alone for launcher and agent."""
    return line.node if line.rank is None else f"{line.node}:{line.rank}"


def clock_time(epoch_us: int) -> str:
    """Write a time of day with ms, in the local zone; dashes where no time is known."""
    if not epoch_us:
        return "--:--:--.---"
    seconds, us = divmod(epoch_us, 1_000_000)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{us // 1000:03}"


def json_line(line: LogLine, *, attempt: int, procs_per_node: int, path: Path) -> str:
    """Write a line as one JSON object; `rank` and `local_rank` are null for launcher and agent."""
    data = {
        "type": "line",
        "ts": _rfc3339(line.epoch_us),
        "node": line.node,
        "rank": line.rank,
        "local_rank": None if line.rank is None else line.rank % max(procs_per_node, 1),
        "stream": line.stream.label,
        "attempt": attempt,
        "text": line.text.decode("utf-8", "replace"),
        "partial": line.partial,
        "file": str(path),
        "offset": line.offset,
    }
    return json.dumps(data) + "\n"


def _rfc3339(epoch_us: int) -> str | None:
    if not epoch_us:
        return None
    seconds, us = divmod(epoch_us, 1_000_000)
    moment = datetime.fromtimestamp(seconds, tz=timezone.utc).replace(microsecond=us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
