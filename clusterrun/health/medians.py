"""Numbers of nodes against those of the others, never against an absolute number."""

from __future__ import annotations

import math
from collections.abc import Mapping

_LEAST_OF_TWO = 0.5  # of two nodes, either may be the slow one


def slow(values: Mapping[str, float], least: float = 0.75) -> dict[str, float]:
    """Return the nodes below `least` of the median of the others, with their share of it.

    The slowest comes first. Values that are not finite are left out.

    >>> slow({"n1": 100.0, "n2": 98.0, "n3": 50.0, "n4": 102.0})
    {'n3': 0.5}
    >>> slow({"n1": 100.0, "n2": 70.0})
    {}
    """
    ordered = sorted((value, node) for node, value in values.items() if math.isfinite(value))
    limit = least if len(ordered) > 2 else min(least, _LEAST_OF_TWO)
    numbers = [value for value, _ in ordered]
    found = {}
    for place, (value, node) in enumerate(ordered[: len(ordered) // 2 + 1]):
        middle = _median_without(numbers, place)
        if middle > 0 and value / middle < limit:
            found[node] = value / middle
    return found


def _median_without(ordered: list[float], place: int) -> float:
    """Return the median of a sorted list without one of its numbers; 0 if that is the only one."""
    size = len(ordered) - 1
    if size < 1:
        return 0.0
    low, high = ((size - 1) // 2, size // 2)
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
