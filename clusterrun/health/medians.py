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
    found = {}
    for place, (value, node) in enumerate(ordered[: len(ordered) // 2]):
        middle = ordered[_middle_without(place, len(ordered))][0]
        if middle > 0 and value / middle < limit:
            found[node] = value / middle
    return found


def _middle_without(place: int, size: int) -> int:
    """Return the place of the (lower) median of a sorted list's other numbers."""
    middle = (size - 2) // 2
    return middle + (middle >= place)
