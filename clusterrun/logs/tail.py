"""Find the last lines of many files: read each backwards, only as far as necessary.

For an overview, also choose earlier error lines: the cause may be old.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from itertools import chain

from clusterrun.logformat.lines import BEFORE_ALL, STAMPED, LogLine, find_stamped, last_stamp
from clusterrun.logs.blocks import Sieve
from clusterrun.logs.dedup import LineCount
from clusterrun.logs.files import MAX_LINE_BYTES, FileKind, OpenFiles
from clusterrun.logs.merge import (
    LINE_BYTES,
    MAX_HELD_BYTES,
    SHORT_LINE_BYTES,
    count_files,
    merge_rounds,
    number_nodes,
)
from clusterrun.logs.sources import Query, Source, errors_of

MOST_LINES = 200_000
_FIRST_BYTES = 4 * 1024
_BLOCK_BYTES = 16 * 1024
_MAX_BLOCK_BYTES = 128 * 1024  # if nothing is wanted; larger ones exceed the cache
_ANYWHERE = 2**62

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
    with OpenFiles(count_files(sources)) as files:
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
        self._newest_us = int(Sieve(source, files).near) or 10**16 - 1
        self._position, self._start = source.end, source.start
        self._rest = b""
        self._block_bytes = _FIRST_BYTES
        self._long_bytes = 0  # to read at once if no line begins in a block
        self._first: tuple[bytes, int] | None = self._fetch()
        self.lines: list[LogLine] = []

    @property
    def is_done(self) -> bool:
        """Return whether everything was read."""
        return self._position <= self._start and not self._first

    @property
    def order(self) -> Order:
        """The place of the newest line not taken yet, or a bound for it."""
        if self.lines:
            line = self.lines[-1]
            return -line.epoch_us, -self._number, -line.offset
        return -self._newest_us, -self._number, -_ANYWHERE

    def read(self) -> int:
        """Read the previous block, a larger one if nothing was wanted; return the lines' bytes."""
        data, offset = self._first or self._fetch()
        self._first = None
        end = 0 if self._sieve_at(data).skips(data, offset) else len(data)
        weight = 0
        while end > 0 and len(self.lines) * SHORT_LINE_BYTES < _BLOCK_BYTES > weight // 4:
            start = self._line_start(data, end - _BLOCK_BYTES)
            start = start if 0 <= start < end else 0
            part = data[start:end]
            picked = self._sieve_at(part).pick(part, offset + start)
            weight += sum(LINE_BYTES + len(line.text) for line in picked)
            self.lines = picked + self.lines
            end = start
        if end > 0:  # enough for now: drop the rest of a large block
            self._position, self._rest, self._block_bytes = offset + end, b"", _BLOCK_BYTES
        elif not self.lines:
            self._block_bytes = min(max(self._block_bytes * 2, _BLOCK_BYTES), _MAX_BLOCK_BYTES)
        if self._source.file.kind is not FileKind.PLAIN and data:
            self._newest_us = int(self._near(data[end:]))
        return weight

    def _fetch(self) -> tuple[bytes, int]:
        """Return the lines before the last ones, from one with a head, and their offset."""
        size = min(max(self._block_bytes, self._long_bytes), self._position - self._start)
        block = self._files.read(self._source.file.path, self._position - size, size)
        if len(block) < size:  # the file was truncated meanwhile
            self._rest = b""
        self._position -= size
        data = block + self._rest
        start = self._line_start(data, 1) if self._position > self._start else 0
        if start < 0 and len(data) <= MAX_LINE_BYTES:
            self._keep(data)
            self._long_bytes = 2 * len(data)
            return b"", self._position
        start, self._long_bytes = max(start, 0), 0
        if self._source.file.kind is not FileKind.PLAIN:
            self._newest_us = int(last_stamp(data[start:]) or self._near(data))
        offset = self._position + start
        self._keep(data[:start])
        return data[start:], offset

    def _keep(self, rest: bytes) -> None:
        """Keep the rest of a line that begins in an earlier block; read a long one again."""
        if len(rest) > _BLOCK_BYTES:
            self._position += len(rest)
            rest = b""
        self._rest = rest

    def _line_start(self, data: bytes, position: int) -> int:
        """Return where the first line with a head begins at or after `position`; -1 if nowhere."""
        if position <= 0:
            return 0
        newline = data.find(b"\n", position - 1)
        if newline < 0 or newline + 1 >= len(data):
            return -1
        is_plain = self._source.file.kind is FileKind.PLAIN
        return newline + 1 if is_plain else find_stamped(data, newline + 1)

    def _sieve_at(self, data: bytes) -> Sieve:
        """Return a sieve for the lines at a place."""
        sieve = Sieve(self._source, self._files)
        if self._source.file.kind is not FileKind.PLAIN:
            sieve.near = self._near(data)
        return sieve

    def _near(self, data: bytes) -> bytes:
        """Return the stamp of the first line; of the line after it if its head is out of reach."""
        if STAMPED.match(data):
            return data[:16]
        return BEFORE_ALL if self._position <= self._source.start else b"%016d" % self._newest_us


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
