"""The page of shared memory by which the agent of a node and its ranks agree on a save point.

The ranks also note there how far they are on the way into their process group.

A file in the spool, mapped by both: 8-byte words, each written by one side alone. All ranks must
save at the same step, and no collective is spent on that. Each rank counts its calls of
`runtime.should_checkpoint()`. To ask, the agents raise `hold`: a rank that sees it waits in its
next call. The head takes the highest count of all ranks, n, and makes n + 1 the save point, `at`:
no rank can be beyond it, since a rank at call n waits at n + 1 at the latest. Ranks that are
behind continue to it. The page holds one save point, so another request follows only one that was
called off (`at` 0).

A save point is a single word, so that a CPU which reorders stores shows a rank all of it or
nothing. From its highest bit: request (22 bits), at (42).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7  # a rank writes its stacks on it; no library uses it
REQUEST_BITS, AT_BITS = 22, 42
HEADER_WORDS = 8
SLOT_WORDS = 8
_HOLD, _SAVE_POINT = range(2)
_CALLS, _STOPPED, _SHIELDED, _JOINING = range(4)
_WORD = struct.Struct("@Q")  # native: copied as one word; other formats may go by bytes


class Joining(IntEnum):
    """How far a rank is on the way into its process group."""

    NOT_YET = 0
    WAITS = 1  # in init_process_group(), for the others
    JOINED = 2  # for good, also if it destroys the group


@dataclass(frozen=True)
class SavePoint:
    """The call of `should_checkpoint` at which all ranks save and leave; none if `at` is 0."""

    request: int
    at: int

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that do not fit into a word."""
        if self.request >> REQUEST_BITS or self.at >> AT_BITS:
            raise ValueError(f"request {self.request} at call {self.at} is beyond the page's words")

    def to_word(self) -> int:
        """Pack the save point into 64 bits."""
        return self.request << AT_BITS | self.at

    @classmethod
    def from_word(cls, word: int) -> SavePoint:
        """Unpack what `to_word` packed."""
        return cls(*divmod(word, 1 << AT_BITS))


class ControlPage:
    """The mapped page; `ranks` is the number of ranks of this node."""

    def __init__(self, path: Path, ranks: int) -> None:
        size = _WORD.size * (HEADER_WORDS + SLOT_WORDS * ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.posix_fallocate(descriptor, 0, size)  # a full disk must not fault a rank later
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    # The agent's side

    def hold(self, request: int) -> None:
        """Have each rank wait in its next call until request number `request` is decided."""
        self._set(_HOLD, request)

    def decide(self, save_point: SavePoint) -> None:
        """Tell the ranks at which call to save and leave."""
        self._set(_SAVE_POINT, save_point.to_word())

    def calls(self, rank: int) -> int:
        """Return how often a rank (a local number) has called; 0 before its first."""
        return self._get(_slot(rank, _CALLS))

    def has_stopped(self, rank: int) -> bool:
        """Whether `should_stop` returned True in a rank."""
        return bool(self._get(_slot(rank, _STOPPED)))

    def is_shielded(self, rank: int) -> bool:
        """Whether a rank ignores SIGTERM, because its agent handles it."""
        return bool(self._get(_slot(rank, _SHIELDED)))

    def joining(self, rank: int) -> Joining:
        """Return how far a rank is on the way into its process group."""
        return Joining(self._get(_slot(rank, _JOINING)))

    # The rank's side

    def count(self, rank: int, calls: int) -> None:
        """Publish that this is the rank's call number `calls`, from 1."""
        self._set(_slot(rank, _CALLS), calls)

    def stopping(self, rank: int) -> None:
        """Publish that `should_stop` returned True in the rank."""
        self._set(_slot(rank, _STOPPED), 1)

    def shielded(self, rank: int) -> None:
        """Publish that the rank ignores SIGTERM from now on."""
        self._set(_slot(rank, _SHIELDED), 1)

    def note_joining(self, rank: int, joining: Joining) -> None:
        """Publish how far the rank is; it never goes back."""
        self._set(_slot(rank, _JOINING), max(joining, self.joining(rank)))

    @property
    def held(self) -> int:
        """The newest request, decided or not; 0 before the first."""
        return self._get(_HOLD)

    @property
    def save_point(self) -> SavePoint:
        """The newest save point."""
        return SavePoint.from_word(self._get(_SAVE_POINT))

    def _get(self, word: int) -> int:
        return int(_WORD.unpack_from(self._map, word * _WORD.size)[0])

    def _set(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * _WORD.size, value)


def _slot(rank: int, word: int) -> int:
    return HEADER_WORDS + SLOT_WORDS * rank + word
