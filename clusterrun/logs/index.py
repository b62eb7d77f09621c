"""Find a time in a file, by bisection and the sparse index of a log."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

from clusterrun.logformat.lines import (
    BEFORE_ALL,
    GAP_LITERAL,
    INDEX_ENTRY_BYTES,
    MAX_HEAD_BYTES,
    IndexEntry,
    find_stamped,
    holds_left_out,
    is_complete,
    unpack_index_entry,
)
from clusterrun.logs.files import LogFile, OpenFiles, file_size

_LOOK_BYTES = 4 * 1024
_COUNT_BYTES = 1024 * 1024
_NOWHERE = 2**62


def seek_time(file: LogFile, epoch_us: int, end: int) -> int:
    """Return the offset of the first line at or after a time, at most `end`.

    Use the index only if the log confirms it. Side files have no index.
    """
    stamp = b"%016d" % min(max(epoch_us, 0), 10**16 - 1)
    with OpenFiles(2) as files:
        low, high = 0, end
        if file.index is not None:
            before, after = _neighbours(files, file.index, epoch_us)
            if before < end and (_stamp_at(files, file.path, before) or stamp) < stamp:
                low = before
            if low < after < end and (_stamp_at(files, file.path, after) or BEFORE_ALL) >= stamp:
                high = after
        return _bisect(files, file.path, stamp, low, high)


def _stamp_at(files: OpenFiles, path: Path, offset: int) -> bytes | None:
    """Return the stamp of the line that begins at an offset, or None."""
    before = 1 if offset else 0
    if not 0 <= offset < _NOWHERE:
        return None
    look = files.read(path, offset - before, before + MAX_HEAD_BYTES)
    if (before and look[:1] != b"\n") or find_stamped(look, before) != before:
        return None
    return look[before : before + 16]


def _neighbours(files: OpenFiles, index: Path, epoch_us: int) -> tuple[int, int]:
    """Return the offsets of the last entry before a time and of the first at or after it."""

    def time_us(number: int) -> int:
        entry = _entry(files, index, number)
        return entry.time_us if entry else _NOWHERE

    count = file_size(index) // INDEX_ENTRY_BYTES
    place = bisect_left(range(count), epoch_us, key=time_us)
    before = _entry(files, index, place - 1) if place else None
    after = _entry(files, index, place) if place < count else None
    return (before.offset if before else 0), (after.offset if after else _NOWHERE)


def _entry(files: OpenFiles, index: Path, number: int) -> IndexEntry | None:
    return unpack_index_entry(files.read(index, number * INDEX_ENTRY_BYTES, INDEX_ENTRY_BYTES))


def _bisect(files: OpenFiles, path: Path, stamp: bytes, low: int, high: int) -> int:
    """Bisect: lines that begin before `low` are older than `stamp`, the one at `high` is not."""
    reach = high  # no line with a head begins from here to `high`
    while reach - low > _LOOK_BYTES:
        middle = (low + reach) // 2
        found = next(_stamped_lines(files, path, middle, reach), None)
        if found is None:
            reach = middle
        elif found[1] < stamp:
            low = found[0] + 1
        else:
            high, reach = found[0], middle
    for offset, found_stamp in _stamped_lines(files, path, low, reach):
        if found_stamp >= stamp:
            return offset
    return high


def _stamped_lines(
    files: OpenFiles, path: Path, start: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and stamp of each line with a head between two offsets."""
    while start < end:
        size = min(_LOOK_BYTES, end - start)
        before = 1 if start else 0  # a line begins after a newline
        look = files.read(path, start - before, before + size + MAX_HEAD_BYTES)
        base = start - before
        at = look.find(b"\n") + 1 if before else 0
        while (at or not before) and (at := find_stamped(look, at)) >= 0:
            if at - before >= size:
                break
            yield base + at, look[at : at + 16]
            at = look.find(b"\n", at) + 1
            if not at:
                break
        if len(look) <= before:
            return
        start += size


def count_lines(file: LogFile) -> int:
    """Count the whole lines of a file without its end record, starting at its last index entry."""
    with OpenFiles(2) as files:
        number, position = _last_entry(files, file)
        while block := files.read(file.path, position, _COUNT_BYTES):
            number += block.count(b"\n")
            position += len(block)
        end = files.read(file.path, max(position - _LOOK_BYTES, 0), _LOOK_BYTES)
    return number - is_complete(end)


def _last_entry(files: OpenFiles, file: LogFile) -> tuple[int, int]:
    """Return the number and offset of the last index entry; (0, 0) unless the log confirms it."""
    count = file_size(file.index) // INDEX_ENTRY_BYTES if file.index else 0
    entry = _entry(files, file.index, count - 1) if file.index and count else None
    if entry is None:
        return 0, 0
    is_there = _stamp_at(files, file.path, entry.offset) == b"%016d" % entry.time_us
    return (entry.line, entry.offset) if is_there else (0, 0)


def has_left_out(side: LogFile) -> bool:
    """Return whether a side file had no room for all error lines."""
    return any(map(holds_left_out, _overlapping(side)))


def has_gaps(side: LogFile) -> bool:
    """Return whether a side file records lost bytes or lines."""
    return any(GAP_LITERAL in data for data in _overlapping(side))


def _overlapping(file: LogFile) -> Iterator[bytes]:
    """Yield a file in blocks; each begins with the end of the one before."""
    position, rest = 0, b""
    with OpenFiles(1) as files:
        while block := files.read(file.path, position, _COUNT_BYTES):
            yield rest + block
            position += len(block)
            rest = block[-_LOOK_BYTES:]
