"""Merge the logs of all nodes by time, or find their last lines.

Most of the reading time is spent here. So a search first looks for its literals in a whole block,
then at the bytes of each line's head (` 149 o `). Only wanted lines become objects.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter

from clusterrun.logformat.lines import (
    BEFORE_ALL,
    LINE_BYTES,
    MAX_HEAD_BYTES,
    RECORDS,
    STAMPED,
    LogLine,
    Stream,
    is_left_out,
    last_stamp,
    parse_line,
    parse_side_text,
    who_wrote,
)
from clusterrun.logformat.literals import Literals
from clusterrun.logs.dedup import LineCount
from clusterrun.logs.sources import (
    MAX_LINE_BYTES,
    FileKind,
    OpenFiles,
    Query,
    Source,
    Takes,
    line_starts,
)
from clusterrun.shared.hostlist import natural_key

_BLOCK_BUDGET_BYTES = 6 * 1024 * 1024  # for one block of each file
_MIN_BLOCK_BYTES = 2 * 1024
_MAX_BLOCK_BYTES = 256 * 1024
_MAX_SKIP_BYTES = 128 * 1024  # a block without wanted lines; larger ones exceed the cache
MAX_HELD_BYTES = 80 * 1024 * 1024  # of lines that wait for those of other files
SHORT_LINE_BYTES = 32  # `_pick` stops at as many lines as a block has of this length
OBJECT_BYTES = 240  # memory of a line in addition to its text
_CUT = "…".encode()

Place = tuple[int, int, int]  # time, node, place in its log: the order of all lines
_AT_THE_END: Place = (2**62, 0, 0)
_BY_TIME = itemgetter(0)


def merge_sources(sources: Iterable[Source]) -> Iterator[LogLine]:
    """Yield the wanted lines by time, node in natural order, and place. Raises ClusterrunError."""
    return chain.from_iterable(merge_rounds(sources))


def merge_rounds(sources: Iterable[Source]) -> Iterator[list[LogLine]]:
    """Yield the lines of `merge_sources` in batches: one line at a time is slow.

    Each round reads all files up to some moment and sorts the lines before it. The memory of all
    files together is bounded.
    """
    sources = list(sources)
    number_of = number_nodes(sources)
    has_side_files = len({source.file.node for source in sources}) < len(sources)
    block_bytes = _BLOCK_BUDGET_BYTES // max(len(sources), 1)
    block_bytes = min(max(block_bytes, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    with OpenFiles() as files:
        sources.sort(key=lambda source: number_of[source.file.node])
        live = [Reader(each, number_of[each.file.node], files, block_bytes) for each in sources]
        while live:
            batch: list[LogLine] = []
            with no_collection():
                _read_ahead(live)
                bound = min(reader.reached for reader in live)
                for reader in live:
                    batch += reader.take(bound)
                if has_side_files:
                    batch.sort(key=lambda line: (line.epoch_us, number_of[line.node], line.offset))
                else:  # the readers are in the order of their nodes, and sorting keeps it
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
        if gc.get_freeze_count() == 0:  # no other code has frozen objects
            gc.freeze()  # the two calls make all lines old without visiting them
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def number_nodes(sources: Iterable[Source]) -> dict[str, int]:
    """Return the nodes of sources, numbered in natural order."""
    nodes = sorted({source.file.node for source in sources}, key=natural_key)
    return {node: number for number, node in enumerate(nodes)}


def _read_ahead(live: list[Reader]) -> None:
    """Read blocks of the files, so that a round passes on many lines, within the memory bound.

    First read a block of each file without waiting lines; a line longer than a block (`long_bytes`)
    only if there is room for it, or if the round waits for its file. Then read the files that lag
    behind, up to the median of all. Read the one furthest behind even if there is no room.
    """
    hindmost = min(live, key=lambda reader: reader.reached)
    room = MAX_HELD_BYTES - sum(reader.held_bytes for reader in live)
    for reader in live:
        if not reader.lines and (reader is hindmost or room > 0 or not reader.long_bytes):
            reader.read()
            room -= reader.held_bytes
    waiting = sorted((r for r in live if not r.is_done), key=lambda reader: reader.reached)
    median = waiting[len(waiting) // 2].reached if waiting else _AT_THE_END
    for reader in waiting:
        room += reader.held_bytes  # its limit includes what it holds
        limit = max(room, _MAX_SKIP_BYTES) if reader is waiting[0] else room
        while reader.reached < median and reader.held_bytes < limit:
            reader.read()
        room -= reader.held_bytes


Head = tuple[bool, "int | None", Stream, bool]


class LineHeads(dict[bytes, "Head | None"]):
    """Maps ` <rank> <stream> ` to its meaning, and to whether such lines are wanted."""

    def __init__(self, takes: Takes) -> None:
        super().__init__()
        self._takes = takes

    def __missing__(self, key: bytes) -> Head | None:
        """Read the head of a line, whatever its stamp; None for what is no head."""
        match = STAMPED.match(BEFORE_ALL + key)
        if not match:
            return None  # not kept: there may be any number of torn heads
        rank, stream, partial = who_wrote(match)
        head = self[key] = (self._takes(rank, stream), rank, stream, partial)
        return head


class Reader:
    """Reads one source forwards; `lines` wait for those of other files.

    If lines are chosen by their text, each wanted piece of a cut line becomes a separate line with
    a mark: the next piece may not be wanted.
    """

    def __init__(self, source: Source, number: int, files: OpenFiles, block_bytes: int) -> None:
        self._source, self._number, self._files = source, number, files
        self._kind = source.file.kind
        self._heads = LineHeads(source.takes)
        # Lines without a head (torn writes, holes) count as the launcher's: see `_add`.
        self._takes_torn = source.takes(None, Stream.LAUNCHER)
        self._usual_bytes = block_bytes
        self._block_bytes = _MAX_SKIP_BYTES if source.literals else block_bytes
        self._position = source.start
        self.long_bytes = 0  # to read at once if the next line is longer than a block
        self._line_bytes = 0  # the memory that one of `lines` takes
        self.lines: list[LogLine] = []
        self.newest_stamp = BEFORE_ALL  # of what was read
        # The next line's place in its node's log.
        self._place = 0 if self._kind is FileKind.ERRORS else source.start
        # All unread lines come after this.
        self.reached: Place = (int(self.newest_stamp), number, 0)
        self.is_done = False

    @property
    def held_bytes(self) -> int:
        """The estimated memory of the waiting lines."""
        return len(self.lines) * self._line_bytes

    def read(self) -> None:
        """Read a block: add its wanted lines to `lines`, and set how far the file is read."""
        if self.is_done:
            return
        size = min(max(self._block_bytes, self.long_bytes), self._source.end - self._position)
        data = self._files.read(self._source.file.path, self._position, size)
        is_last = len(data) < size or self._position + size >= self._source.end
        whole = len(data) if is_last else data.rfind(b"\n") + 1
        used, picked = self._pick(data, whole, self._position)  # sets newest_stamp and _place
        self._position += used
        self.is_done = is_last and used >= whole
        self.reached = (int(self.newest_stamp), self._number, self._place)
        if self.is_done:
            self.reached = _AT_THE_END
        self.long_bytes = 0 if used else 2 * len(data)  # not one whole line: read more
        if used < whole:  # there were enough wanted lines: the rest of the block is read again
            self._block_bytes = self._usual_bytes
        elif not picked:  # skip faster
            self._block_bytes = min(self._block_bytes * 2, _MAX_SKIP_BYTES)
        if picked:
            self.lines += picked
            self._line_bytes = self._estimated_memory(data, picked)

    def _estimated_memory(self, data: bytes, picked: Sequence[LogLine]) -> int:
        """Return the bytes that a line of a block takes in memory, on average."""
        text_bytes = len(data) // (data.count(b"\n") + 1)
        if self._kind is FileKind.ERRORS:  # which may have only the beginning of a line
            text_bytes = sum(len(line.text) for line in picked) // len(picked) or text_bytes
        return OBJECT_BYTES + text_bytes

    def _pick(self, data: bytes, whole: int, offset: int) -> tuple[int, list[LogLine]]:
        """Pick wanted lines until there are enough; return the number of bytes used, and the lines.

        `data` begins at `offset`. Its first `whole` bytes are whole lines; the rest is torn, or too
        long to be a line. Also move `newest_stamp` and `_place` past what was used.
        """
        picked: list[LogLine] = []
        start, lines, literals = 0, data[:whole], self._source.literals
        if literals and not any(literal in lines for literal in literals):
            self._advance(lines, offset)
            start = whole
        while start < len(data) and len(picked) * SHORT_LINE_BYTES < self._usual_bytes:
            newline = data.find(b"\n", start, start + MAX_LINE_BYTES + 1)
            if newline < 0 and len(data) - start > MAX_LINE_BYTES:
                end = start + MAX_LINE_BYTES  # too long to be a line
            elif start >= whole:
                break
            else:  # about a usual block, up to the end of a line
                end = data.find(b"\n", start + self._usual_bytes, whole) + 1 or whole
            picked += self._wanted(data[start:end], offset + start)
            start = end
        return start, picked

    def _advance(self, data: bytes, offset: int) -> None:
        """Note the last stamp of `data`, which was read at `offset`, and the place after it."""
        if self._kind is not FileKind.PLAIN:
            self.newest_stamp = max(self.newest_stamp, last_stamp(data) or self.newest_stamp)
        if self._kind is not FileKind.ERRORS:  # the lines of a side file name theirs
            self._place = offset + len(data)

    def _wanted(self, data: bytes, offset: int) -> list[LogLine]:
        """Return the wanted lines of `data`, which contains whole lines and begins at `offset`."""
        is_plain = self._kind is FileKind.PLAIN
        lines = self._parse_plain(data, offset) if is_plain else self._parse(data, offset)
        if self._kind is FileKind.ERRORS:
            lines = list(self._without_class(lines))
        self._advance(data, offset)
        if self._source.wants is not None:
            lines = [
                line._replace(text=line.text + _CUT, partial=False) if line.partial else line
                for line in filter(self._source.wants, lines)
            ]
        return lines

    def _parse(self, data: bytes, offset: int) -> list[LogLine]:
        """Return the wanted lines of `data`; for a search, parse only those around its literals."""
        lines: list[LogLine] = []
        literals = self._source.literals
        for start, end in find_stretches(data, literals) if literals else [(0, len(data))]:
            self._add(lines, data[start:end], offset + start)
        return lines

    def _add(self, lines: list[LogLine], data: bytes, offset: int) -> None:
        """Add the wanted lines of `data`, which begins at `offset`, and set `newest_stamp`.

        A line whose stamp runs backwards gets the time of the line before it. So does a line
        without a head (a torn write, a hole), which is attributed to the launcher.
        """
        add, new, heads, torn = lines.append, tuple.__new__, self._heads, self._takes_torn
        node, newest, newest_us = self._source.file.node, self.newest_stamp, int(self.newest_stamp)
        for raw in data.split(b"\n"):
            cut = raw.find(b" ", 17) + 3  # after `<16 digits> <rank> <letter> `
            head = heads[raw[16:cut]]
            if head is not None and ((stamp := raw[:16]) == newest or stamp.isdigit()):
                if stamp > newest:
                    newest, newest_us = stamp, int(stamp)
                wanted, rank, stream, partial = head
                if wanted:
                    add(new(LogLine, (newest_us, node, rank, stream, raw[cut:], partial, offset)))
            elif torn and raw:
                add(LogLine(newest_us, node, None, Stream.LAUNCHER, raw, False, offset))
            offset += len(raw) + 1
        self.newest_stamp = newest

    def _parse_plain(self, data: bytes, offset: int) -> list[LogLine]:
        """Return lines that have no stamp, nor a rank: the time is unknown (0)."""
        if not self._source.takes(None, Stream.OUT):
            return []
        node = self._source.file.node
        return [
            LogLine(0, node, None, Stream.OUT, raw[1], not raw[2], offset + raw.start())
            for raw in re.finditer(rb"([^\n]*)(\n?)", data)
            if raw[0]
        ]

    def _without_class(self, lines: list[LogLine]) -> Iterator[LogLine]:
        """Yield the lines of a side file without `<class> <offset>`; damaged ones stay whole."""
        for line in lines:
            entry = parse_side_text(line.text)
            if entry is None:
                yield line._replace(offset=self._place)
                continue
            self._place = max(self._place, entry.offset)
            if self._source.only_errors and not entry.kind and line.stream not in RECORDS:
                continue
            noted = line._replace(text=entry.text, offset=self._place)
            if not is_left_out(noted):  # the record that some had no room is not shown
                yield self._in_full(noted) if entry.has_more else noted

    def _in_full(self, noted: LogLine) -> LogLine:
        """Read the whole line from the log; mark it as cut if the log lacks it."""
        log = self._source.file.log
        raw = self._files.read(log, noted.offset, MAX_HEAD_BYTES + LINE_BYTES) if log else b""
        raw, newline, _ = raw.partition(b"\n")
        found = parse_line(raw, node=noted.node, offset=noted.offset, near_us=0)
        has_same_writer = (found.rank, found.stream) == (noted.rank, noted.stream)
        if newline and has_same_writer and found.text.startswith(noted.text):
            return noted._replace(text=found.text + _CUT if found.partial else found.text)
        return noted._replace(text=noted.text + _CUT)

    def take(self, bound: Place) -> list[LogLine]:
        """Remove and return the lines before a place."""
        if self.is_done:
            self._files.close(self._source.file.path)
        if self.reached <= bound:  # all of them are before it
            taken, self.lines = self.lines, []
            return taken
        time, number, place = bound
        if number == self._number:
            cut = bisect_left(self.lines, (time, place), key=itemgetter(0, 6))  # time, offset
        elif self._number < number:  # of two lines at one time, the lower node's comes first
            cut = bisect_right(self.lines, time, key=_BY_TIME)
        else:
            cut = bisect_left(self.lines, time, key=_BY_TIME)
        taken = self.lines[:cut]
        del self.lines[:cut]
        return taken


def find_stretches(data: bytes, literals: Literals) -> list[tuple[int, int]]:
    """Return ranges of lines with a literal, each from a line with a head: that has the time."""
    hits = {literal: data.find(literal) for literal in literals}  # the next of each; -1: none
    found: list[tuple[int, int]] = []
    end = 0
    while places := [place for place in hits.values() if place >= 0]:
        place = min(places)
        start = data.rfind(b"\n", 0, place) + 1
        while start > end and not STAMPED.match(data, start):
            start = data.rfind(b"\n", 0, start - 1) + 1
        newline = data.find(b"\n", place)
        end = newline + 1 if newline >= 0 else len(data)
        found.append((start, end))
        for literal, place in hits.items():
            if 0 <= place < end:
                hits[literal] = data.find(literal, end)
    return found


# The last lines: each file is read backwards, only as far as necessary

_FIRST_BYTES = 4 * 1024
_BLOCK_BYTES = 16 * 1024
_ENOUGH_BYTES = 64 * 1024  # of lines of one file to hold: there may be a thousand files
_ANYWHERE = 2**62
_AFTER_ALL = b"9" * 16  # a stamp

Order = tuple[int, int, int]  # minus time, minus node, minus place: the newest comes first


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last lines in batches; `errors` are error lines before them. `is_cut`: there are more."""

    rounds: Iterable[Sequence[LogLine]]
    errors: Sequence[LogLine] = ()
    is_cut: bool = False

    def __iter__(self) -> Iterator[LogLine]:
        return chain(self.errors, chain.from_iterable(self.rounds))


def find_newest(sources: Iterable[Source], count: int, *, folded: bool = False) -> Tail:
    """Return the last `count` lines of `merge_sources`, in its order, fewer if memory is full.

    The pieces of a line count as one and, if `folded`, equal lines of many ranks, as `dedup` shows
    them. Raises ClusterrunError for a file that can't be read.
    """
    sources = list(sources)
    number_of = number_nodes(sources)
    found: list[LogLine] = []
    held_bytes = 0
    is_full = False
    counted = LineCount(folded=folded)
    with OpenFiles() as files:
        readers = [_Backward(source, number_of[source.file.node], files) for source in sources]
        heap = [(reader.order, index, reader) for index, reader in enumerate(readers)]
        heapq.heapify(heap)
        while heap and count:
            _, index, reader = heap[0]
            if reader.lines:
                counted.add(reader.lines[-1])
                if counted.count > count:  # too many: it is no piece of the oldest wanted line
                    break
                found.append(reader.lines.pop())
            elif held_bytes > MAX_HELD_BYTES:
                is_full = True
            else:
                held_bytes += reader.read()
            if not reader.lines and (reader.is_done or is_full):
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (reader.order, index, reader))
    found.reverse()
    return Tail(rounds=[found], is_cut=bool(heap) or is_full)


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
        newest = last_stamp(data)  # `order` goes by it until lines are read
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
        start, stamp = self._find_start()
        block = replace(self._source, start=start, end=self._end)
        reader = Reader(block, self._number, self._files, _MAX_SKIP_BYTES)
        reader.newest_stamp = stamp
        while not reader.is_done:
            reader.read()
        self.lines, self._end, self._newest_us = reader.lines, start, int(stamp)
        held_bytes = self._hold()  # if it drops older lines, it sets all three to what is left
        larger = min(max(self._block_bytes * 2, _BLOCK_BYTES), _MAX_SKIP_BYTES)
        self._block_bytes = _BLOCK_BYTES if self.lines else larger
        return held_bytes

    def _hold(self) -> int:
        """Keep the newest lines that are enough for now; return their bytes."""
        # The offsets of a side file's lines are those in the log: the side file can't be cut there.
        is_side = self._source.file.kind is FileKind.ERRORS
        held_bytes = 0
        for place in range(len(self.lines) - 1, -1, -1):
            held_bytes += OBJECT_BYTES + len(self.lines[place].text)
            if held_bytes > _ENOUGH_BYTES and not is_side:
                self.lines = self.lines[place:]
                self._end, self._newest_us = self.lines[0].offset, self.lines[0].epoch_us
                break
        return held_bytes

    def _find_start(self) -> tuple[int, bytes]:
        """Return where the block begins, if possible at a line with a head, and the stamp."""
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
    sources: Iterable[Source], query: Query, count: int | None, *, folded: bool = False
) -> Tail:
    """Return the last `count` lines (None: all) of the sources of a query.

    In an overview, the newest `count // 2` error lines of all ranks come first if they are older.
    """
    sources = list(sources)
    if count is None:
        return Tail(rounds=merge_rounds(sources))
    found = find_newest(sources, count, folded=folded)
    if not (found.is_cut and query.overview):
        return found
    sides = [
        replace(each, only_errors=True, takes=lambda _, stream: stream in query.streams)
        for each in sources
        if each.file.kind is FileKind.ERRORS
    ]
    shown = {(line.node, line.offset) for line in found}
    begin_us = next((line.epoch_us for line in found), 0)
    errors = find_newest(sides, count // 2, folded=folded)
    # A newer one that is not shown was written after the end of its log was looked up.
    hidden = (line for line in errors if (line.node, line.offset) not in shown)
    older = [line for line in hidden if line.epoch_us <= begin_us]
    return replace(found, errors=older)
