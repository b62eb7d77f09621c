"""What more ranks gain: speed-up, efficiency and what is lost, from measured step times."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.estimates.inputs import Setup


@dataclass(frozen=True, kw_only=True)
class Point:
    """One world that was measured: `step_s` is the median time of a step, over `steps` steps."""

    nodes: int
    ranks: int
    step_s: float
    steps: int
    job_id: str
    run_dir: str


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a world gains over the smallest one.

    >>> gain = Gain(speedup=6.6, efficiency=6.6 / 8)
    >>> round(gain.communication, 3)
    0.175
    """

    speedup: float
    efficiency: float

    @property
    def communication(self) -> float:
        """The share of the time that is lost: communication and waiting for the slowest rank."""
        return max(0.0, 1 - self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Worlds of one script, the smallest first; all else was the same.

    `is_fixed_batch`: a step of every world takes the same samples, otherwise each rank keeps its
    own. `measured_at` is local time in ISO 8601.
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
        """Whether it holds for a setup, of any number of nodes; of divided models none does."""
        asked = (setup.strategy.value, setup.procs_per_node * setup.parallel.model, is_cpu)
        return asked == (self.strategy, self.procs_per_node, self.is_cpu)

    def _rate(self, point: Point) -> float:
        """Return samples a second, in units of the samples that a rank (or all) has in a step."""
        return (1 if self.is_fixed_batch else point.ranks) / point.step_s
