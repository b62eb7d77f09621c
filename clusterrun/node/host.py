"""What the conductor needs from the place where it runs: Slurm and this machine implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Hearing(Protocol):
    """What tells of signals (`signals.Signals`)."""

    def wait(self, seconds: float) -> list[int]:
        """Return the signals that arrive within a time."""


class Step(Protocol):
    """One attempt's processes."""

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def end(self) -> None:
        """End it in order, as the job is ended; where Slurm does so, do nothing."""

    def kill(self) -> None:
        """Leave none of its processes behind."""


class Host(Protocol):
    """Where a run's attempts run: a job of Slurm, or this machine."""

    @property
    def job_id(self) -> str:
        """The job's id."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that name the job and its nodes."""

    @property
    def is_witness(self) -> bool:
        """Whether somebody but end.json knows how the job ended."""

    @property
    def time_limit_s(self) -> float:
        """The time limit that the conductor must hold."""

    @property
    def register_after_s(self) -> float:
        """How long whoever submitted the job may take to record it."""

    def nothing_left(self) -> str:
        """Return why there is nothing to do for this job; empty if there is."""

    def start(self, attempt: int, *, is_relaunch: bool, excluded: tuple[str, ...]) -> Step:
        """Start an attempt. Raises OSError."""

    def register(self) -> None:
        """Record the run's job unless it is recorded. Raises ClusterrunError and OSError."""

    def is_over(self) -> bool:
        """Return whether the scheduler's time limit is what ends the job now."""

    def answers(self) -> bool:
        """Return whether the scheduler answers."""

    def requeue(self) -> str:
        """Requeue the job; return why that is refused. Raises SchedulerUnreachableError."""

    def stay_down(self, *, is_preempted: bool) -> None:
        """Have nobody start this job again once it has ended."""

    def submit_successor(self, excluded: tuple[str, ...]) -> str:
        """Submit the run's next job and return its id. Raises ClusterrunError and OSError."""
