"""The page of shared memory with which the agent of a node and its ranks agree on a save point.

The ranks also note there that they have joined their process group.

The page is a file in the spool that both sides map. It consists of 8-byte words; only one side
writes each. All ranks save at the same step without a collective: each counts its calls, and waits
in its next one once the leader holds all; the leader chooses the call after the highest count n of
all nodes. No rank is beyond it: the rank at n waits at n + 1. The page has room for one save point,
so a new request follows only one that was cancelled (`at` 0).

A save point is a single word: even if a CPU reorders stores, a rank sees all of it or nothing.
From the highest bit: request (22 bits), at (42).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from pathlib import Path
from typing import NamedTuple

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7  # a rank writes its stacks on it; no library uses it
AT_BITS = 42
HEADER_WORDS = 8
SLOT_WORDS = 8
_HOLD, _SAVE_POINT = range(2)
_CALLS, _STOPPED, _SHIELDED, _JOINED = range(4)
_WORD = struct.Struct("@Q")  # native: copied as one word; other formats may copy bytes


class SavePoint(NamedTuple):
    """The call of `should_checkpoint` at which all ranks save and stop; none if `at` is 0."""

    request: int
    at: int


class ControlPage:
    """The mapped page; `ranks` is the number of this node's ranks that it shows."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = range(ranks)
        size = _WORD.size * (HEADER_WORDS + SLOT_WORDS * ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.posix_fallocate(descriptor, 0, size)  # or a full disk kills a rank by SIGBUS
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    # The agent's side

    def hold(self, request: int) -> None:
        """Make each rank wait in its next call until request number `request` is decided."""
        self._set(_HOLD, request)

    def decide(self, save_point: SavePoint) -> None:
        """Set the call at which the ranks save and stop."""
        self._set(_SAVE_POINT, save_point.request << AT_BITS | save_point.at)

    def calls(self, rank: int) -> int:
        """Return how often a rank (its local rank) has called; 0 before the first call."""
        return self._get(_slot(rank, _CALLS))

    @property
    def is_used(self) -> bool:
        """Return whether any rank has called should_checkpoint()."""
        return any(map(self.calls, self.ranks))

    def has_stopped(self, rank: int) -> bool:
        """Return whether `should_stop` returned True in a rank."""
        return bool(self._get(_slot(rank, _STOPPED)))

    @property
    def has_left(self) -> bool:
        """Return whether any rank exits because it was asked to."""
        return any(map(self.has_stopped, self.ranks))

    def does_not_save_on(self, rank: int, signum: int = signal.SIGTERM) -> bool:
        """Return whether a rank's handler of a signal saves nothing: the agent is to act."""
        return bool(self._get(_slot(rank, _SHIELDED)) >> signum & 1)

    def has_joined(self, rank: int) -> bool:
        """Return whether a rank has joined a process group, even if it has destroyed it."""
        return bool(self._get(_slot(rank, _JOINED)))

    # The rank's side

    def count(self, rank: int, calls: int) -> None:
        """Publish that this is the rank's call number `calls`, counted from 1."""
        self._set(_slot(rank, _CALLS), calls)

    def stopping(self, rank: int) -> None:
        """Publish that `should_stop` returned True in the rank."""
        self._set(_slot(rank, _STOPPED), 1)

    def set_does_not_save_on(self, rank: int, signum: int = signal.SIGTERM) -> None:
        """Publish that the rank saves nothing on a signal from now on: one bit each."""
        self._set(_slot(rank, _SHIELDED), self._get(_slot(rank, _SHIELDED)) | 1 << signum)

    def joined(self, rank: int) -> None:
        """Publish that the rank has joined a process group."""
        self._set(_slot(rank, _JOINED), 1)

    @property
    def newest_request(self) -> int:
        """The newest request, whether decided or not; 0 before the first."""
        return self._get(_HOLD)

    @property
    def save_point(self) -> SavePoint:
        """The newest save point."""
        return SavePoint(*divmod(self._get(_SAVE_POINT), 1 << AT_BITS))

    def _get(self, word: int) -> int:
        return int(_WORD.unpack_from(self._map, word * _WORD.size)[0])

    def _set(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * _WORD.size, value)


def _slot(rank: int, word: int) -> int:
    return HEADER_WORDS + SLOT_WORDS * rank + word
