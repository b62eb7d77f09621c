"""Find the last lines of many files: read each backwards, only as far as necessary.

For an overview, also choose earlier error lines: the cause may be old.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from itertools import chain

from clusterrun.logformat.lines import BEFORE_ALL, LogLine, last_stamp
from clusterrun.logs.dedup import LineCount
from clusterrun.logs.merge import (
    MAX_HELD_BYTES,
    OBJECT_BYTES,
    Reader,
    merge_rounds,
    number_nodes,
)
from clusterrun.logs.sources import (
    MAX_LINE_BYTES,
    FileKind,
    OpenFiles,
    Query,
    Source,
    errors_of,
    line_starts,
)

MOST_LINES = 200_000
_FIRST_BYTES = 4 * 1024
_BLOCK_BYTES = 16 * 1024
_MAX_BLOCK_BYTES = 128 * 1024  # if nothing is wanted; larger ones exceed the cache
_ENOUGH_BYTES = 64 * 1024  # of lines of one file to hold: there may be a thousand files
_ANYWHERE = 2**62
_AFTER_ALL = b"9" * 16  # a stamp

Order = tuple[int, int, int]  # minus time, minus node, minus place: the newest comes first


class Cut(Flag):
    """What a tail leaves out."""

    NOTHING = 0
    LINES = auto()
    ERRORS = auto()
    FULL = auto()  # more lines, for lack of memory


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last lines in batches; `errors` are the error lines before the first of them."""

    rounds: Iterable[Sequence[LogLine]]
    errors: Sequence[LogLine] = ()
    cut: Cut = Cut.NOTHING

    def __iter__(self) -> Iterator[LogLine]:
        return chain(self.errors, chain.from_iterable(self.rounds))


def find_newest(sources: Iterable[Source], count: int, *, folded: bool = False) -> Tail:
    """Return the last `count` lines of `merge_sources`, in its order, fewer if memory is full.

    The pieces of a line count once. `folded` counts equal lines of many ranks once, as `dedup`
    shows them, and returns at most MOST_LINES. Raises ClusterrunError for a file that can't be
    read.
    """
    sources = list(sources)
    number_of = number_nodes(sources)
    found: list[LogLine] = []
    held_bytes = 0
    is_full = False
    counted = LineCount(folded=folded)
    with OpenFiles() as files:
        readers = [_Backward(source, number_of[source.file.node], files) for source in sources]
        heap = [(reader.order, place, reader) for place, reader in enumerate(readers)]
        heapq.heapify(heap)
        while heap and count:
            _, place, reader = heap[0]
            if reader.lines:
                counted.add(reader.lines[-1])
                if counted.count > count:  # not a piece of the oldest wanted line
                    break
                found.append(reader.lines.pop())
                if folded and len(found) >= MOST_LINES:
                    is_full = True
                    break
            elif held_bytes > MAX_HELD_BYTES:
                is_full = True
            else:
                held_bytes += reader.read()
            if reader.lines or not (reader.is_done or is_full):
                heapq.heapreplace(heap, (reader.order, place, reader))
            else:
                heapq.heappop(heap)
    found.reverse()
    is_all = not (heap or is_full)
    cut = Cut.NOTHING if is_all else Cut.LINES | (Cut.FULL if is_full else Cut.NOTHING)
    return Tail(rounds=[found], cut=cut)


class _Backward:
    """Reads one source backwards; `lines` were read but not taken yet, the newest last."""

    def __init__(self, source: Source, number: int, files: OpenFiles) -> None:
        self._source, self._number, self._files = source, number, files
        self._end = source.end  # everything from here on was read
        self._block_bytes = _FIRST_BYTES
        start = max(source.start, source.end - _FIRST_BYTES)
        data = files.read(source.file.path, start, source.end - start)
        if start > source.start:
            data = data[data.find(b"\n") + 1 :]
        newest = last_stamp(data)
        self._newest_us = int(newest or _AFTER_ALL)
        self.lines: list[LogLine] = []

    @property
    def is_done(self) -> bool:
        """Return whether everything was read."""
        return self._end <= self._source.start

    @property
    def order(self) -> Order:
        """The place of the newest line not taken yet, or a bound for it."""
        if self.lines:
            line = self.lines[-1]
            return -line.epoch_us, -self._number, -line.offset
        return -self._newest_us, -self._number, -_ANYWHERE

    def read(self) -> int:
        """Read the previous block, a larger one if nothing was wanted; return the lines' bytes."""
        start, stamp = self._begin()
        block = replace(self._source, start=start, end=self._end)
        reader = Reader(block, self._number, self._files, _MAX_BLOCK_BYTES)
        reader.near = stamp
        while not reader.is_done:
            reader.read()
        self.lines, self._end, self._newest_us = reader.lines, start, int(stamp)
        held_bytes = self._hold()
        larger = min(max(self._block_bytes * 2, _BLOCK_BYTES), _MAX_BLOCK_BYTES)
        self._block_bytes = _BLOCK_BYTES if self.lines else larger
        return held_bytes

    def _hold(self) -> int:
        """Keep the newest lines that are enough for now; return their bytes."""
        is_side = self._source.file.kind is FileKind.ERRORS  # its places are those of the log
        held_bytes = 0
        for place in range(len(self.lines) - 1, -1, -1):
            held_bytes += OBJECT_BYTES + len(self.lines[place].text)
            if held_bytes > _ENOUGH_BYTES and not is_side:
                self.lines = self.lines[place:]
                self._end, self._newest_us = self.lines[0].offset, self.lines[0].epoch_us
                break
        return held_bytes

    def _begin(self) -> tuple[int, bytes]:
        """Return where the block begins, at a line with a head if it has one, and the stamp."""
        size = self._block_bytes
        while (start := self._end - size) > self._source.start:
            found = next(line_starts(self._files, self._source.file, start, self._end), None)
            if found is not None:
                return found
            if size > MAX_LINE_BYTES:  # too long to be a line
                return start, b"%016d" % self._newest_us
            size *= 2
        return self._source.start, BEFORE_ALL


def last_lines(
    sources: Iterable[Source],
    query: Query,
    count: int | None,
    *,
    folded: bool = False,
) -> Tail:
    """Return the last `count` lines (None: all) of the sources of a query.

    In an overview up to half of them are the newest error lines of all ranks.
    """
    sources = list(sources)
    if count is None:
        return Tail(rounds=merge_rounds(sources))
    found = find_newest(sources, count, folded=folded)
    if not (found.cut and query.overview):
        return found
    newest_errors = find_newest(errors_of(sources, query), count // 2, folded=folded)
    errors = list(newest_errors)
    lines = _with_room(list(found), errors, count, folded=folded)
    cut = found.cut | (Cut.ERRORS if newest_errors.cut else Cut.NOTHING)
    return Tail(rounds=[lines], errors=_before(lines, errors) if lines else (), cut=cut)


def _with_room(
    lines: list[LogLine], errors: list[LogLine], count: int, *, folded: bool
) -> list[LogLine]:
    """Drop the oldest of the last lines if older error lines need room.

    All error lines among the rest are also in `errors`.
    """
    if not _before(lines, errors):
        return lines
    kept = set(map(_place, errors))
    counted, others = LineCount(folded=folded), LineCount(folded=folded)
    for line in reversed(errors):
        counted.add(line)
    for start in range(len(lines), 0, -1):
        line = lines[start - 1]
        if _place(line) not in kept:
            others.add(line)
            if others.count > count - counted.count:
                return lines[start:]
    return lines


def _before(lines: list[LogLine], errors: list[LogLine]) -> list[LogLine]:
    """Return the error lines that are older than all of `lines`."""
    shown = set(map(_place, lines))
    return [e for e in errors if e.epoch_us <= lines[0].epoch_us and _place(e) not in shown]


def _place(line: LogLine) -> tuple[str, int]:
    return line.node, line.offset
