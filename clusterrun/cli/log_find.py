"""Find the job that a name means: a run of ours, a job of somebody else's tool, or a log file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.cli import output
from clusterrun.cli.log_job import ForeignLogs, LogJob, RunLogs
from clusterrun.cli.status import find_announced
from clusterrun.errors import JobNotFoundError, SchedulerUnreachableError, UsageError
from clusterrun.wording import count

if TYPE_CHECKING:
    from clusterrun.logs.foreign import ForeignJob


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a name on the command line means; a log file names its node and attempt, too."""

    job: LogJob
    nodes: frozenset[str] | None = None
    attempt: int | None = None


def find_log_job(name: str | None) -> Named:
    """Find the job that a name means.

    Raises JobNotFoundError, and SchedulerUnreachableError where Slurm alone could know.
    """
    if name is None:
        return Named(job=RunLogs(record=find_announced(None)))
    if _is_file(name):
        job = _find_foreign(name)
        if job is None:
            raise JobNotFoundError(f"no log file {name}")
        return _adopted(job)
    try:
        return _find_run(name)
    except JobNotFoundError:
        job = _find_foreign(name)
        if job is None:
            raise
        return _adopted(job)


def _find_run(name: str) -> Named:
    """Find a run of ours; the id of one elsewhere may be that of another job here, for Slurm."""
    from clusterrun import api
    from clusterrun import record as records

    places = api.places_of_runs()
    try:
        record = records.resolve_job(name, places)
    except UsageError:  # the id of several runs elsewhere
        job = _find_own_job(name)
        if job is None:
            raise
        return _adopted(job)
    if name not in record.job_ids or _is_same(record.runs_dir.root, places[0].root):
        return Named(job=RunLogs(record=record))
    job = _find_own_job(name)
    if job is not None and not (job.run_dir and _is_same(job.run_dir, record.paths.root)):
        return _adopted(job)
    output.say(f"using job {name} of {record.run_dir}")
    return Named(job=RunLogs(record=record))


def _find_own_job(name: str) -> ForeignJob | None:
    """Ask Slurm for a job of this user; one that is silent knows none."""
    from clusterrun import record as records
    from clusterrun.backends.foreign import is_job_id

    if not is_job_id(name):
        return None
    try:
        job = _find_foreign(name)
    except SchedulerUnreachableError:
        return None
    is_own = job is not None and any(part.user == records.current_user() for part in job.parts)
    return job if is_own else None


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or in a directory that may not be read
        return False


def _find_foreign(name: str) -> ForeignJob | None:
    from clusterrun.logs.foreign import find_foreign

    return find_foreign(name, Path.cwd())


def _adopted(job: ForeignJob) -> Named:
    if job.run_dir is not None:
        from clusterrun import api

        run = RunLogs(record=api.find_record(str(job.run_dir)))
        if job.job_id:
            return Named(job=run)
        file = job.files[0]
        attempt = int(file.path.parent.name.removeprefix("a"))
        return Named(job=run, nodes=frozenset({file.label}), attempt=attempt)
    if job.job_id:
        files = count(len(job.files), "file")
        output.note(
            f"job {job.job_id} was not started by clusterrun; it has {files}, without times"
        )
    if job.problem:
        output.note(f"Slurm could not be asked: {job.problem}")
    return Named(job=ForeignLogs(job=job))
