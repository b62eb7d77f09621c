"""The page of shared memory by which the agent of a node and its ranks agree on a checkpoint.

A file in the spool, mapped by both: 8-byte words, each written by one side alone. All ranks must
save at the same step, and no collective is spent on that. Each rank counts its calls of
`runtime.should_checkpoint()`. To ask, the agents raise `hold`: a rank that sees it waits in its
next call. From the highest count of all ranks the head chooses the call at which all save and
leave, `at`; who is not there yet goes on to it. Nobody can be beyond it: a rank that was seen at
call n waits at n + 1 at the latest, and `at` is that. Another request follows only one that was
called off, `at` 0, since the page holds one decision.

A decision is a single word, so that a CPU which reorders stores shows a rank all of it or nothing.
From its highest bit: request (22 bits), at (42).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7  # a rank writes down where it is; no library uses it
REQUEST_BITS, AT_BITS = 22, 42
HEADER_WORDS = 8
SLOT_WORDS = 8
_HOLD, _DECISION = range(2)
_CALLS, _STOPPED, _SHIELDED = range(3)
_WORD = struct.Struct("@Q")  # native: copied as one word, where standard formats may go by bytes


@dataclass(frozen=True)
class Decision:
    """At which call of `should_checkpoint` all save and leave; `at` 0 lets all go on."""

    request: int
    at: int

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that the page has no room for."""
        if self.request >> REQUEST_BITS or self.at >> AT_BITS:
            raise ValueError(f"request {self.request} at call {self.at} is beyond the page's words")

    def to_word(self) -> int:
        """Pack the decision into 64 bits."""
        return self.request << AT_BITS | self.at

    @classmethod
    def from_word(cls, word: int) -> Decision:
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

    def decide(self, decision: Decision) -> None:
        """Tell the ranks at which call to save and leave."""
        self._set(_DECISION, decision.to_word())

    def calls(self, rank: int) -> int:
        """Return how often a rank (a local number) has called; 0 before its first."""
        return self._get(_slot(rank, _CALLS))

    def has_stopped(self, rank: int) -> bool:
        """Say whether a rank was told by `should_stop` to leave."""
        return bool(self._get(_slot(rank, _STOPPED)))

    def is_shielded(self, rank: int) -> bool:
        """Say whether SIGTERM does nothing in a rank, since its agent sees to it."""
        return bool(self._get(_slot(rank, _SHIELDED)))

    # The rank's side

    def count(self, rank: int, calls: int) -> None:
        """Publish that this is the rank's call number `calls`, from 1."""
        self._set(_slot(rank, _CALLS), calls)

    def stopping(self, rank: int) -> None:
        """Publish that the rank was told to leave."""
        self._set(_slot(rank, _STOPPED), 1)

    def shielded(self, rank: int) -> None:
        """Publish that SIGTERM does nothing in the rank from now on."""
        self._set(_slot(rank, _SHIELDED), 1)

    @property
    def held(self) -> int:
        """The newest request, decided or not; 0 before the first."""
        return self._get(_HOLD)

    @property
    def decision(self) -> Decision:
        """The newest decision."""
        return Decision.from_word(self._get(_DECISION))

    def _get(self, word: int) -> int:
        return int(_WORD.unpack_from(self._map, word * _WORD.size)[0])

    def _set(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * _WORD.size, value)


def _slot(rank: int, word: int) -> int:
    return HEADER_WORDS + SLOT_WORDS * rank + word
