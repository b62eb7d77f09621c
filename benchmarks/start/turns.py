"""Measure contenders in turns; compare them turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from benchmarks.report import Value, median, spread

T = TypeVar("T")


def in_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure each contender once in a turn, each turn in another order; the first warms up."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in rotated(list(contenders), turn):
            measured = contenders[name]()
            if turn:
                found[name].append(measured)
    return found


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names, in the first turn in their order, in each later turn one further.

    >>> rotated(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each turn."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def compared(
    times: Mapping[str, Sequence[float]], ours: str, budgets: Mapping[str, float]
) -> list[dict[str, Value]]:
    """Return a row for each contender: its time, and ours divided by it, turn by turn.

    `budgets` are the ratios that must not be exceeded, by contender.
    """
    return [_row(name, values, times[ours], budgets) for name, values in times.items()]


def _row(
    name: str, values: Sequence[float], ours: Sequence[float], budgets: Mapping[str, float]
) -> dict[str, Value]:
    each = ratios(ours, values)
    return {
        "what": name,
        "median_s": median(values),
        "extremes_s": spread(values),
        "ours : it": median(each),
        "ours : it, extremes": spread(each),
        "budget": budgets.get(name),
        "turns": len(values),
    }


def parts(found: Sequence[Mapping[str, float | None]]) -> dict[str, Value]:
    """Return the median of each named part; None if no turn knows it."""
    middle: dict[str, Value] = {}
    for name in dict.fromkeys(key for each in found for key in each):
        known = [value for each in found if (value := each.get(name)) is not None]
        middle[name] = median(known) if known else None
    return middle
