"""Compute speed-up, efficiency and loss with more ranks, from measured step times."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.estimates.inputs import Setup


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured world: `step_s` is the median time of a step, over `steps` steps."""

    nodes: int
    ranks: int
    step_s: float
    steps: int
    job_id: str
    run_dir: str


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of a world over the smallest one.

    >>> gain = Gain(speedup=6.6, efficiency=6.6 / 8)
    >>> round(gain.communication, 3)
    0.175
    """

    speedup: float
    efficiency: float

    @property
    def communication(self) -> float:
        """Return the share of time lost to communication and waiting for the slowest rank."""
        return max(0.0, 1 - self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Measured worlds of one script that differ in nodes only, the smallest first.

    `is_fixed_batch`: a step has the same number of samples in every world; otherwise each rank
    keeps its batch. `measured_at` is local time in ISO 8601.
    """

    script: str
    strategy: str
    is_cpu: bool
    procs_per_node: int
    is_fixed_batch: bool
    measured_at: str
    points: tuple[Point, ...]

    def gain(self, point: Point) -> Gain:
        """Compare a world with the smallest one."""
        base = self.points[0]
        speedup = self._rate(point) / self._rate(base)
        return Gain(speedup=speedup, efficiency=speedup * base.ranks / point.ranks)

    def is_of(self, setup: Setup, *, is_cpu: bool) -> bool:
        """Return whether it applies to a setup on any number of nodes; False if it is divided."""
        asked = (setup.strategy.value, setup.procs_per_node * setup.parallel.model, is_cpu)
        return asked == (self.strategy, self.procs_per_node, self.is_cpu)

    def _rate(self, point: Point) -> float:
        """Return samples a second, in units of a rank's batch, or of the fixed batch."""
        return (1 if self.is_fixed_batch else point.ranks) / point.step_s
