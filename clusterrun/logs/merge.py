"""Merge the logs of all nodes by time."""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter

from clusterrun.logformat.lines import LogLine
from clusterrun.logs.blocks import Sieve
from clusterrun.logs.files import MAX_LINE_BYTES, FileKind, OpenFiles
from clusterrun.logs.sources import Source
from clusterrun.shared.hostlist import natural_key

_BLOCK_BUDGET_BYTES = 6 * 1024 * 1024  # for one block of each file
_MIN_BLOCK_BYTES = 2 * 1024
_MAX_BLOCK_BYTES = 256 * 1024
_MAX_SKIP_BYTES = 128 * 1024  # a block without wanted lines; larger ones exceed the cache
MAX_HELD_BYTES = 80 * 1024 * 1024  # of lines that wait for those of other files
SHORT_LINE_BYTES = 32
LINE_BYTES = 240  # memory of a line in addition to its text

Place = tuple[int, int, int]  # time, node, place in its log: the order of all lines
_AT_THE_END: Place = (2**62, 0, 0)
_BY_TIME = itemgetter(0)


def merge_sources(sources: Iterable[Source]) -> Iterator[LogLine]:
    """Yield the wanted lines by (time, node in natural order, place in the node's log).

    Raises ClusterrunError for a file that can't be read.
    """
    return chain.from_iterable(merge_rounds(sources))


def merge_rounds(sources: Iterable[Source]) -> Iterator[list[LogLine]]:
    """Yield the lines of `merge_sources` in batches: one line at a time is slow.

    Each round reads all files up to some moment and sorts the lines before it. The memory of all
    files together is bounded.
    """
    sources = list(sources)
    number_of = number_nodes(sources)
    is_split = len({source.file.node for source in sources}) < len(sources)
    block_bytes = _BLOCK_BUDGET_BYTES // max(len(sources), 1)
    block_bytes = min(max(block_bytes, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    with OpenFiles(count_files(sources)) as files:
        live = [
            _Reader(source, number_of[source.file.node], files, block_bytes)
            for source in sorted(sources, key=lambda source: number_of[source.file.node])
        ]
        while live:
            batch: list[LogLine] = []
            with no_collection():
                _read_ahead(live)
                bound = min(reader.reached for reader in live)
                for reader in live:
                    batch += reader.take(bound)
                if is_split:
                    batch.sort(key=lambda line: (line.epoch_us, number_of[line.node], line.offset))
                else:
                    batch.sort(key=_BY_TIME)
            yield batch
            del batch
            live = [reader for reader in live if reader.lines or not reader.is_done]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection: of many small objects it takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else other code uses it
            gc.freeze()  # together they make all lines old without visiting them
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def number_nodes(sources: Iterable[Source]) -> dict[str, int]:
    """Return the nodes of sources, numbered in natural order."""
    nodes = {source.file.node for source in sources}
    return {node: number for number, node in enumerate(sorted(nodes, key=natural_key))}


def count_files(sources: Iterable[Source]) -> int:
    """Return how many files may be open at once."""
    paths = {path for source in sources for path in (source.file.path, source.file.log)}
    return len(paths - {None})


def _read_ahead(live: list[_Reader]) -> None:
    """Read the files that lag behind, up to the median of all, within the memory bound.

    So a round advances many files, or one that lags far behind. Read a long line if there is room
    for it, or if all others wait for its file.
    """
    first = min(live, key=lambda reader: reader.reached)
    room = MAX_HELD_BYTES - sum(reader.held_bytes for reader in live)
    for reader in live:
        if not reader.lines and (reader is first or room > 0 or not reader.long_bytes):
            reader.read()
            room -= reader.held_bytes
    waiting = sorted((r for r in live if not r.is_done), key=lambda reader: reader.reached)
    target = waiting[len(waiting) // 2].reached if waiting else _AT_THE_END
    for reader in waiting:
        room += reader.held_bytes
        limit = max(room, _MAX_SKIP_BYTES if reader is waiting[0] else 0)
        while reader.reached < target and reader.held_bytes < limit:
            reader.read()
        room -= reader.held_bytes


class _Reader:
    """Reads one source forwards; `lines` wait for those of other files."""

    def __init__(self, source: Source, number: int, files: OpenFiles, block_bytes: int) -> None:
        self._source, self._number, self._files = source, number, files
        self._sieve = Sieve(source, files)
        self._usual_bytes = block_bytes
        self._block_bytes = _MAX_SKIP_BYTES if source.literals else block_bytes
        self._position = source.start
        self._rest = b""
        self.long_bytes = 0  # to read at once if the next line is longer than a block
        self._line_bytes = 0
        self.lines: list[LogLine] = []
        # All unread lines come after this.
        self.reached: Place = (int(self._sieve.near), number, 0)
        self.is_done = False

    @property
    def held_bytes(self) -> int:
        """The estimated memory of the waiting lines."""
        return len(self.lines) * self._line_bytes

    def read(self) -> None:
        """Read the next block, a larger one if the last held nothing wanted."""
        if self.is_done:
            return
        size = min(max(self._block_bytes, self.long_bytes), self._source.end - self._position)
        block = self._files.read(self._source.file.path, self._position, size)
        data = self._rest + block
        offset = self._position - len(self._rest)
        self._position += len(block)
        self.is_done = not block or self._position >= self._source.end
        whole = len(data) if self.is_done else data.rfind(b"\n") + 1
        read, picked = self._pick(data, whole, offset)
        self._rest = data[read:]
        if read < whole:  # enough for now: drop the rest of a large block
            self._position, self._rest, self.is_done = offset + read, b"", False
            self._block_bytes = self._usual_bytes
        elif len(self._rest) > self._usual_bytes:  # read again later
            self._position, self._rest = offset + read, b""
        elif not picked:
            self._block_bytes = min(self._block_bytes * 2, _MAX_SKIP_BYTES)
        self.long_bytes = 0 if read else 2 * len(data)
        if picked:
            # An estimate of the memory of a line; a side file may have only its beginning.
            is_side = self._source.file.kind is FileKind.ERRORS
            text_bytes = sum(len(line.text) for line in picked) // len(picked) if is_side else 0
            self._line_bytes = LINE_BYTES + (text_bytes or len(data) // (data.count(b"\n") + 1))
            self.lines += picked
        self.reached = (int(self._sieve.near), self._number, self._sieve.place)
        if self.is_done:
            self.reached = _AT_THE_END
            self._files.close(self._source.file.path)

    def _pick(self, data: bytes, whole: int, offset: int) -> tuple[int, list[LogLine]]:
        """Pick wanted lines until there are enough; return the bytes read, and the lines."""
        picked: list[LogLine] = []
        start = whole if self._sieve.skips(data[:whole], offset) else 0
        while start < len(data) and len(picked) * SHORT_LINE_BYTES < self._usual_bytes:
            newline = data.find(b"\n", start, start + MAX_LINE_BYTES + 1)
            if newline < 0 and len(data) - start > MAX_LINE_BYTES:
                end = start + MAX_LINE_BYTES  # too long to be a line
            elif start >= whole:
                break
            else:
                end = data.find(b"\n", start + self._usual_bytes, whole) + 1 or whole
            picked += self._sieve.pick(data[start:end], offset + start)
            start = end
        return start, picked

    def take(self, bound: Place) -> list[LogLine]:
        """Remove and return the lines before a place."""
        if self.reached <= bound:
            taken, self.lines = self.lines, []
            return taken
        time, number, place = bound
        if number == self._number:
            cut = bisect_left(self.lines, (time, place), key=itemgetter(0, 6))
        else:
            cut = bisect_left(self.lines, time + (self._number < number), key=_BY_TIME)
        taken = self.lines[:cut]
        del self.lines[:cut]
        return taken
