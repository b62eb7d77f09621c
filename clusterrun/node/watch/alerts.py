"""Decide from a node's samples which alerts hold: pure, with hysteresis.

An alert is raised after three samples in a row at its limit, and cleared five points below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clusterrun.rundir.usage import Alert, AlertKind, Sample

LIMITS: Final = {
    AlertKind.HOST_MEMORY: 70.0,  # percent of the limit
    AlertKind.GPU_MEMORY: 80.0,  # percent of what the GPU has
    AlertKind.GPU_TEMPERATURE: 85.0,  # degrees Celsius
    AlertKind.GPU_IDLE: 10.0,  # minutes, while another GPU of the node works
}
IDLE_PERCENT: Final = 5.0
GROWTH_S: Final = 600.0  # the time over which growth is measured
SAMPLES: Final = 3
_POINTS: Final = 5.0
_LEAST_S: Final = GROWTH_S / 2  # a shorter time, such as a script's start, tells nothing
_MOST_S: Final = 24 * 3600.0  # what is full later is not said

Key = tuple[AlertKind, int | None]
State = Mapping[Key, Alert | int]  # an alert that holds, or how many samples were at the limit


def following(state: State, sample: Sample) -> dict[Key, Alert | int]:
    """Return the state after a sample; a value that is not known changes nothing."""
    return {
        **state,
        **{key: _next(state.get(key, 0), key, at, sample.at) for key, at in _values(sample)},
    }


def _next(before: Alert | int, key: Key, value: float, at: float) -> Alert | int:
    limit = LIMITS[key[0]]
    if isinstance(before, Alert):
        return before if value > limit - _POINTS else 0
    count = before + 1 if value >= limit else 0
    return count if count < SAMPLES else Alert(kind=key[0], gpu=key[1], at=at)


def holding(state: State) -> tuple[Alert, ...]:
    """Return the alerts that hold."""
    return tuple(alert for alert in state.values() if isinstance(alert, Alert))


def _values(sample: Sample) -> Iterator[tuple[Key, float]]:
    if sample.host_percent is not None:
        yield (AlertKind.HOST_MEMORY, None), sample.host_percent
    works = any(gpu.activity is not None and gpu.activity >= IDLE_PERCENT for gpu in sample.gpus)
    for gpu in sample.gpus:
        found = {
            AlertKind.GPU_MEMORY: gpu.memory_percent,
            AlertKind.GPU_TEMPERATURE: gpu.temperature_c,
            AlertKind.GPU_IDLE: None if gpu.activity is None else gpu.idle_s / 60 * works,
        }
        yield from (((kind, gpu.index), each) for kind, each in found.items() if each is not None)


def full_in_s(points: Sequence[tuple[float, int]], limit: int) -> float | None:
    """Return when memory is full if it grows as in the points of time and bytes, by least squares.

    None if it does not grow, or if too little is known.
    """
    if len(points) < 2 or points[-1][0] - points[0][0] < _LEAST_S:
        return None
    middle = sum(at for at, _ in points) / len(points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    slope = sum((at - middle) * used for at, used in points) / spread
    left = limit - points[-1][1]
    return round(left / slope, 1) if slope > 0 and 0 < left < slope * _MOST_S else None
