"""Find a time in a file by bisection, and what a side file lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clusterrun.logformat.lines import GAP_LITERAL, MAX_HEAD_BYTES, find_stamped, holds_left_out
from clusterrun.logs.files import LogFile, OpenFiles

_LOOK_BYTES = 4 * 1024
_BLOCK_BYTES = 1024 * 1024


def seek_time(file: LogFile, epoch_us: int, end: int) -> int:
    """Return the offset of the first line at or after a time, at most `end`."""
    stamp = b"%016d" % min(max(epoch_us, 0), 10**16 - 1)
    low, high = 0, end
    reach = high  # no line with a head begins from here to `high`
    with OpenFiles(1) as files:
        while reach - low > _LOOK_BYTES:
            middle = (low + reach) // 2
            found = next(_stamped_lines(files, file.path, middle, reach), None)
            if found is None:
                reach = middle
            elif found[1] < stamp:
                low = found[0] + 1
            else:
                high, reach = found[0], middle
        lines = _stamped_lines(files, file.path, low, reach)
        return next((offset for offset, found_stamp in lines if found_stamp >= stamp), high)


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
        while block := files.read(file.path, position, _BLOCK_BYTES):
            yield rest + block
            position += len(block)
            rest = block[-_LOOK_BYTES:]
