"""Log lines for people, with a prefix, equal ones folded, safe for a terminal; and for programs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from clusterrun.logformat.lines import MAX_SPEAKERS, Gap, LogLine, Stream
from clusterrun.logformat.symptoms import Classifier
from clusterrun.logs.dedup import Copies, Dedup, Tracebacks
from clusterrun.logs.text import clock_time, readable, strip_controls, utc_time
from clusterrun.logs.view import Joiner, View, gap_sentence, printable, source_name
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.wording import count

_SPREAD_US = 100_000  # between the first and last copy; less is not shown

# Bright black and white are left to the terminal, red to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = "\x1b[31m"
_RESET = "\x1b[0m"
_MARKS = {Stream.ERR: "!", Stream.GAP: "~"}


def node_colour(node: str) -> int:
    """Return a node's colour, chosen by a hash of its name: the same in every run."""
    return _COLOURS[zlib.crc32(node.encode("utf-8", "surrogateescape")) % len(_COLOURS)]


class TextView(View):
    """Writes lines for people; an unfinished line gets a mark.

    The prefix is as wide as the longest name in `nodes` with the highest rank; it grows only for a
    longer name that appears later. `time_chars` of the times are shown: 0, 8 (whole seconds) or 12
    (with milliseconds).
    """

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        nodes: Iterable[str],
        world_size: int,
        prefix: bool = True,
        colour: bool = False,
        time_chars: int = 0,
        dedup: bool = False,
    ) -> None:
        super().__init__(write, Joiner())
        self._prefix, self._colour, self._time_chars = prefix, colour, time_chars
        self._world_size = world_size
        folded = Dedup(write=self._write, world_size=world_size)
        tracebacks = Tracebacks(take=folded.feed)
        self._folders = (tracebacks, folded)
        self._take = tracebacks.feed if dedup else self._write
        self._width = 0
        self._heads: dict[tuple[str, int | None, Stream], str] = {}
        for node in nodes:
            self._make_room_for(node)

    def unfinished(self) -> str | None:
        """Return the newest unfinished line, without colours or newline."""
        line = self._joiner.unfinished()
        if line is None:
            return None
        body = readable(line.text, keep_colours=False)
        if not self._prefix:
            return body
        self._make_room_for(line.node)
        return f"{source_name(line).ljust(self._width)} {_MARKS.get(line.stream, '|')} {body}"

    def _show_line(self, line: LogLine) -> None:
        self._take(line, readable(line.text, keep_colours=self._colour))

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self._take(line, strip_controls(gap_sentence(gap), keep_colours=False))

    def _write(self, line: LogLine, body: str, copies: Copies | None = None) -> None:
        chars = self._time_chars
        start = f"{clock_time(line.epoch_us)[:chars]} " if chars else ""
        if copies:
            what = "node" if line.rank is None else "rank"
            label = f"[{count(copies.count, f'more {what}' if copies.is_late else what)}]"
            start += self._written(label, line.stream, colour=1)
        else:
            start += self._head(line)
        if not (copies or "\n" in body):
            self._put(f"{start}{body}\n".encode())
            return
        texts = body.split("\n")
        if copies and copies.is_late:
            texts = texts[-1:]  # the end of a traceback; the rest was shown before
        if copies and self._prefix:
            texts[-1] += _spread(copies)
        for text in texts:
            self._put(f"{start}{text}\n".encode())

    def _head(self, line: LogLine) -> str:
        source = (line.node, line.rank, line.stream)
        head = self._heads.get(source)
        if head is None:
            self._make_room_for(line.node)
            head = self._written(source_name(line), line.stream, colour=node_colour(line.node))
            if len(self._heads) < MAX_SPEAKERS:
                self._heads[source] = head
        return head

    def _written(self, who: str, stream: Stream, *, colour: int) -> str:
        if not self._prefix:
            return ""
        mark = _MARKS.get(stream, "|")
        if not self._colour:
            return f"{who.ljust(self._width)} {mark} "
        mark = f"{_RED}{mark}{_RESET}" if mark == "!" else mark
        return f"\x1b[{colour}m{who.ljust(self._width)}{_RESET} {mark} "

    def _make_room_for(self, node: str) -> None:
        longest = f"{printable(node)}:{max(self._world_size - 1, 0)}"
        if len(longest) > self._width:
            self._width = len(longest)
            self._heads.clear()


def _spread(copies: Copies) -> str:
    took_us = copies.last_us - copies.line.epoch_us
    if took_us < _SPREAD_US:
        return ""
    return f"   (first {source_name(copies.line)}, last +{took_us / 1_000_000:.1f} s)"


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class JsonView(View):
    """Writes one object per line; it names a node's log within the run directory."""

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        paths: RunPaths,
        procs_per_node: int,
        attempt: int,
    ) -> None:
        super().__init__(write, Joiner(exact=True), attempt)
        self._paths = paths
        self._procs_per_node = max(procs_per_node, 1)
        self._classifier = Classifier()
        self._frames: dict[tuple[str, int | None, Stream], tuple[str, str]] = {}

    def start_attempt(self, attempt: int) -> None:
        """Write what is left of the previous attempt."""
        super().start_attempt(attempt)
        self._frames.clear()

    def _show_line(self, line: LogLine) -> None:
        source = (line.node, line.rank, line.stream)
        before, after = self._frames.get(source) or self._new_frame(source)
        time = "null" if not line.epoch_us else f'"{utc_time(line.epoch_us)}"'
        level = '"error"' if self._classifier.classify(source, line.text) else "null"
        text = encode_basestring_ascii(line.text.decode("utf-8", "replace"))
        self._put(
            (
                f'{{"type":"line","ts":{time},{before},"level":{level},'
                f'"text":{text},{after},"offset":{line.offset},'
                f'"partial":{"true" if line.partial else "false"}}}\n'
            ).encode()
        )

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        record = {
            "type": "gap",
            "ts": utc_time(line.epoch_us),
            "node": line.node,
            "rank": line.rank,
            "stream": gap.stream.label,
            "bytes": gap.size_bytes,
            "reason": gap.reason,
        }
        self._put(to_json(record))

    def _new_frame(self, source: tuple[str, int | None, Stream]) -> tuple[str, str]:
        """Format once the fields that all lines of a source share."""
        node, rank, stream = source
        before = {
            "node": node,
            "rank": rank,
            "local_rank": None if rank is None else rank % self._procs_per_node,
            "stream": stream.label,
            "attempt": self._attempt,
        }
        file = self._paths.log(self._attempt, node).relative_to(self._paths.root)
        after = {"file": str(file)}
        frame = to_json(before).decode()[1:-2], to_json(after).decode()[1:-2]
        if len(self._frames) < MAX_SPEAKERS:
            self._frames[source] = frame
        return frame
