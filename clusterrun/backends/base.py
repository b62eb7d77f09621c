"""What a place to run jobs can do, and what it says about a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from clusterrun.errors import ClusterrunError, SchedulerUnreachableError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState

if TYPE_CHECKING:
    from clusterrun.rundir.record import JobRecord


class PerhapsSubmittedError(SchedulerUnreachableError):
    """The scheduler did not answer a submission: the job may be in the queue or not."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Where a job went; `slurm_cluster` is named only at sites that have several.

    `held` is what to raise, once the job is recorded, about one that should start and can't.
    """

    job_id: str
    slurm_cluster: str | None = None
    held: ClusterrunError | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """What a scheduler says about one job; None is what it did not say.

    Times are seconds of the epoch; `start` is set once the job has started, `expected_start`
    before; `limit_s` is None without a limit, too. `source` is who said so (squeue, sacct,
    scontrol, files, nobody), `asked_at` when they were asked, and `note` says in words what
    could not be known.
    """

    job_id: str
    state: JobState
    source: str
    reason: str = ""
    nodelist: str = ""
    elapsed_s: int | None = None
    limit_s: int | None = None
    expected_start: float | None = None
    start: float | None = None
    end: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    restarts: int | None = None
    asked_at: float | None = None
    note: str = ""


class Backend(Protocol):
    """A scheduler, or this machine; equal backends are asked together."""

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Start a run whose directory is laid out; a refused run's directory is removed.

        Raises SubmissionError, SchedulerUnreachableError.
        """
        ...

    def submit_again(
        self,
        plan: Plan,
        record: JobRecord,
        *,
        after: str = "",
        exclude: str = "",
        chained: bool = False,
        waits: bool = False,
    ) -> Submission:
        """Start one more job of a run; its directory stays, whatever becomes of that.

        It starts after the job `after`. What the plan says of a start (dependency, begin, hold) was
        met by the run's first job, and counts again only where it `waits`.
        Raises SubmissionError, SchedulerUnreachableError (PerhapsSubmittedError where the job
        may be in the queue).
        """
        ...

    def query(
        self,
        job_ids: Sequence[str],
        *,
        since: float | None = None,
        max_age_s: float | None = None,
        own: bool = False,
    ) -> dict[str, SchedulerJob]:
        """Ask about all jobs at once; a job that nobody knows is missing from the answer.

        `since` is when the oldest of them was submitted; an answer up to `max_age_s` old will do
        (None: as old as the backend thinks kind to its scheduler). `own`: all are this user's.
        """
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs; those that have ended already stay as they are.

        Raises JobNotFoundError when one is unknown.
        """
        ...

    def interrupt(self, job_id: str) -> None:
        """Have the agents of a running job look what is requested of its attempt.

        Raises ClusterrunError where they can't be told.
        """
        ...

    def release(self, job_id: str) -> bool:
        """Start a requeued job that is held back now; False where it is none.

        Raises ClusterrunError where that is not allowed.
        """
        ...
