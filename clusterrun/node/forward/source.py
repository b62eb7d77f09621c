"""Read an output file in the spool as it grows, and free the space of forwarded bytes."""

from __future__ import annotations

import contextlib
import os

from clusterrun.logformat.lines import LINE_BYTES
from clusterrun.node.forward.spool import Output, ReadSpace
from clusterrun.node.forward.stamp import Piece, split_pieces

BLOCK_BYTES = 1 << 17  # read and stamped together: 3 MiB of memory if each line is empty
HELD_S = 1.0  # how long the beginning of a line waits for its end
GIVE_BACK_BYTES = 1 << 22


class SpoolReader:
    """Read the output of a rank or the launcher as it grows.

    The file is never truncated: that could lose what its rank is writing.
    """

    def __init__(self, output: Output, now_us: int) -> None:
        self.rank, self.stream = output.rank, output.stream
        self.size = self.position = 0
        self.mtime_us = 0
        self.read_until_us = now_us  # unread bytes were written after that
        self._held: tuple[int, int, float] | None = None  # position, size, since when
        self._space = ReadSpace(GIVE_BACK_BYTES)
        self._descriptor = os.open(output.path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def unread(self) -> int:
        """How many bytes wait in the file."""
        return self.size - self.position

    def look(self) -> None:
        """Update the file's size and mtime."""
        found = os.fstat(self._descriptor)
        if found.st_size < self.position:  # the script truncated its own output
            self.position = 0
            self._space.start_again()
        self.size, self.mtime_us = found.st_size, found.st_mtime_ns // 1000

    def is_due(self, now: float, *, is_last: bool) -> bool:
        """Return whether there is more to forward than the beginning of an unfinished line."""
        if not self.unread or self._held is None or is_last:
            return bool(self.unread)
        position, size, since = self._held
        return (position, size) != (self.position, self.size) or now - since >= HELD_S

    def read(self, now: float, *, is_last: bool) -> list[Piece]:
        """Return the next lines; `now` in seconds of the monotonic clock."""
        data = os.pread(self._descriptor, min(BLOCK_BYTES, self.unread), self.position)
        is_end = len(data) == self.unread
        is_long_held = self._held is not None and self._held[0] == self.position
        since = self._held[2] if self._held and is_long_held else now
        pieces = split_pieces(data, with_rest=is_end and (is_last or now - since >= HELD_S))
        taken = sum(len(piece.text) for piece in pieces)
        if is_last and is_end and taken < len(data):  # part of a character, and no rest
            pieces.append(Piece(data[taken:], is_cut=True))
            taken = len(data)
        self.position += taken
        still = since if not taken else now
        self._held = (self.position, self.size, still) if is_end and taken < len(data) else None
        return pieces

    def drop(self, count: int) -> int:
        """Skip the oldest bytes, to the end of a line if one is near; return how many."""
        start, end = self.position, min(self.position + count, self.size)
        if end < self.size:
            end += _next_start(os.pread(self._descriptor, LINE_BYTES, end))
        end = min(end, self.size)
        self.position, self._held = end, None
        self.give_back()
        return end - start

    def give_back(self) -> None:
        """Free the space of forwarded bytes, if the file system supports it."""
        self._space.give_back(self._descriptor, self.position)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _next_start(near: bytes) -> int:
    """Return the offset of the next line, else of the next character."""
    newline = near.find(b"\n")
    if newline >= 0:
        return newline + 1
    return next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def water_level(amounts: list[int], budget: int) -> int:
    """Return the level to which the largest amounts must be cut so that all fit into the budget.

    >>> water_level([10, 2, 7], 12)
    5
    """
    left, count = max(0, budget), len(amounts)
    for amount in sorted(amounts):
        if amount * count > left:
            return left // count
        left, count = left - amount, count - 1
    return max(amounts, default=0)
