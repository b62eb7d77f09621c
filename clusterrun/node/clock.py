"""The time of the head node, in which all nodes stamp what they write."""

from __future__ import annotations


class Clock:
    """How far this node's clock is ahead of the head's; 0 until the nodes have met."""

    offset_us: int = 0

    def corrected(self, epoch_us: int) -> int:
        """Turn a time of this node into the head's."""
        return epoch_us - self.offset_us
