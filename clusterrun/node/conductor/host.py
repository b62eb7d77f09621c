"""What the conductor needs from the place where it runs: Slurm and this machine implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from clusterrun.errors import ClusterrunError


class Step(Protocol):
    """One attempt's processes."""

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def end(self) -> None:
        """End it in order, as the job is ended; where Slurm does so, do nothing."""

    def kill(self) -> None:
        """Leave none of its processes behind."""


class Host(Protocol):
    """Where a run's attempts run; what is implemented here is for a place without a queue.

    `is_witness`: somebody but end.json knows how the job ended. `time_limit_s` is what the
    conductor must hold; `register_after_s` is how long whoever submitted may take to record it.
    """

    job_id: str
    is_witness: bool = False
    register_after_s: float = 0.0
    time_limit_s: float = float("inf")
    environ: Mapping[str, str]

    def start(self, attempt: int, *, is_relaunch: bool, excluded: tuple[str, ...]) -> Step:
        """Start an attempt. Raises OSError."""

    def register(self) -> None:
        """Record the run's job unless it is recorded. Raises ClusterrunError and OSError."""

    def nothing_left(self) -> str:
        """Return why there is nothing to do for this job; empty if there is."""
        return ""

    def is_over(self) -> bool:
        """Return whether the scheduler's time limit is what ends the job now."""
        return False

    def answers(self) -> bool:
        """Return whether the scheduler answers."""
        return True

    def requeue(self) -> str:
        """Requeue the job; return why that is refused. Raises SchedulerUnreachableError."""
        return NO_QUEUE

    def submit_successor(self, excluded: tuple[str, ...]) -> str:
        """Submit the run's next job and return its id. Raises ClusterrunError and OSError."""
        raise ClusterrunError(NO_QUEUE)

    def stay_down(self) -> None:
        """Have nobody start this job again once it has ended."""
        return


NO_QUEUE = "there is no queue here"
