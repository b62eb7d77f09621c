"""The interface of a backend, and what it reports about a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from clusterrun.errors import SchedulerUnreachableError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared.state import JobId, JobState

if TYPE_CHECKING:
    from clusterrun.rundir.record import Home, JobRecord


class PerhapsSubmittedError(SchedulerUnreachableError):
    """The scheduler did not answer a submission: the job may or may not be queued."""


class Submission(NamedTuple):
    """A submitted job."""

    job_id: JobId
    slurm_cluster: str | None = None  # only at sites that have several
    home: Home | None = None  # if this machine does not see the run directory


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """What a scheduler reports about one job; None is unknown, times are epoch seconds."""

    job_id: str
    state: JobState
    source: str  # what was queried: squeue, sacct, scontrol, files; "" if none knows the job
    reason: str = ""
    nodelist: str = ""
    elapsed_s: int | None = None
    limit_s: int | None = None  # also None without a limit
    expected_start: float | None = None  # set until the job has started
    start: float | None = None  # set once it has started
    end: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    partition: str = ""  # that the job requests; several with commas
    asked_nodes: int | None = None  # that the job requests
    asked_at: float | None = None  # when the scheduler was queried
    note: str = ""  # what remains unknown


class Where(NamedTuple):
    """What a backend may need to find its jobs; a scheduler's module gets it: `backend(where)`."""

    runs_dir: RunsDir
    slurm_cluster: str | None = None  # as recorded of a job
    is_shared: bool = False  # for hosts: the first one must see `runs_dir`


class Backend(Protocol):
    """A scheduler, or this machine; one query covers all jobs of equal backends."""

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Submit a run. Raises SubmissionError, SchedulerUnreachableError; the caller cleans up."""

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
        """Submit another job of a run; keep the run directory even if that fails.

        It starts after the job `after`. A host list `exclude` replaces the plan's. `chained` means
        that it is a later job of a chain. The run's first job met the plan's start conditions
        (dependency, begin, hold); they apply again only if it `waits`. Raises SubmissionError,
        SchedulerUnreachableError (PerhapsSubmittedError if the job may be queued).
        """

    def query(
        self, job_ids: Sequence[str], *, since: float | None = None, max_age_s: float | None = None
    ) -> dict[str, SchedulerJob]:
        """Query all jobs at once; unknown jobs are not in the answer.

        `since` is when the oldest of them was submitted; the answer may be `max_age_s` old (None:
        the backend's default).
        """

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; ignore those that have ended. Raises JobNotFoundError if one is unknown."""
