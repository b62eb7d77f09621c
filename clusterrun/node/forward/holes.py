"""Free the space at the beginning of a file while others write to its end."""

from __future__ import annotations

import ctypes

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


class ReadSpace:
    """The part of a file that was read; the file keeps its size, so writers do not notice."""

    def __init__(self, every_bytes: int) -> None:
        self._every_bytes = every_bytes
        self._given_back = 0
        self._can_give_back = True

    def give_back(self, descriptor: int, position: int) -> None:
        """Free the bytes before a position, if they are enough and the file system supports it."""
        start, end = self._given_back, position // _PAGE_BYTES * _PAGE_BYTES
        if self._can_give_back and end - start >= self._every_bytes:
            mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
            result: int = _LIBC.fallocate(
                descriptor, mode, ctypes.c_long(start), ctypes.c_long(end - start)
            )
            self._can_give_back = result == 0
            self._given_back = end

    def start_again(self) -> None:
        """Start at the first byte: the file was truncated."""
        self._given_back = 0
