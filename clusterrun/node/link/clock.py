"""The conductor's time, which all nodes use for their timestamps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

PINGS = 8
LEAST_US = 1_000  # NTP keeps clocks closer than this


def now_us() -> int:
    """Return this node's time in µs since the epoch."""
    return time.time_ns() // 1000


class Clock:
    """This node's clock, and how far it is ahead of the conductor's; 0 until the nodes have met."""

    def __init__(self, now_us: Callable[[], int] = now_us) -> None:
        self.now_us = now_us
        self.offset_us = self._sent_us = 0
        self._found: list[Offset] = []

    def corrected(self, epoch_us: int) -> int:
        """Convert a time of this node to the conductor's."""
        return epoch_us - self.offset_us

    def corrected_s(self, epoch_s: float) -> float:
        """Convert a time of this node, in seconds, to the conductor's."""
        return epoch_s - self.offset_us / 1_000_000

    def ping(self) -> None:
        """Record that a ping was sent."""
        self._sent_us = self.now_us()

    def pong(self, head_us: int) -> Offset | None:
        """Take the conductor's time from an answer; return the offset after the last, else None.

        The fastest of several pings is the best (RFC 5905).
        """
        now_us = self.now_us()
        middle_us = (self._sent_us + now_us) // 2
        self._found.append(Offset(offset_us=middle_us - head_us, rtt_us=now_us - self._sent_us))
        if len(self._found) < PINGS:
            return None
        found, self._found = self._found, []
        return min(found, key=lambda offset: offset.rtt_us)


@dataclass(frozen=True, kw_only=True)
class Offset:
    """How far this clock is ahead of the conductor's, measured by a ping that took `rtt_us`."""

    offset_us: int
    rtt_us: int

    @property
    def is_certain(self) -> bool:
        """Return whether the clocks differ by more than the ping can explain."""
        return abs(self.offset_us) > max(LEAST_US, self.rtt_us / 2)
