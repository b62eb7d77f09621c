"""Find the run that a name refers to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from clusterrun.backends.machine_facts import working_directory
from clusterrun.backends.slurm import foreign, query
from clusterrun.config.spec import JobSpec
from clusterrun.errors import JobNotFoundError, UsageError
from clusterrun.rundir import record as records
from clusterrun.rundir.known_roots import remembered_roots
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.record import JobRecord
from clusterrun.verbs.config import load_spec

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job

Which: TypeAlias = "str | JobRecord | Job"
"""A job: its id, name or path, its record, or its handle."""


def find_record(job: Which | None = None) -> JobRecord:
    """Find a run by job id, SLUID, name, run id or a path in it; None is this project's newest.

    Raises JobNotFoundError, and SchedulerUnreachableError if only Slurm could know the job.
    """
    if job is not None and not isinstance(job, str):
        return job if isinstance(job, JobRecord) else job.record
    places = places_of_runs()
    try:
        return records.resolve_job(job, places)
    except JobNotFoundError:
        number = query.job_of_sluid(job or "")
        if number:
            return records.resolve_job(number, places)
        if foreign.is_job_id(job or "") and (parts := foreign.ask(job or "")):
            raise _not_ours(job or "", parts[0].user) from None
        raise


def _not_ours(job_id: str, user: str) -> JobNotFoundError:
    return JobNotFoundError(
        f"Slurm has job {job_id} of user {user or 'unknown'}, but no run here has this id",
        hint=(
            "pass the run directory if clusterrun started it",
            f"otherwise run: clusterrun logs {job_id}, or scontrol show job {job_id}",
        ),
    )


def is_elsewhere(record: JobRecord) -> bool:
    """Return whether a run belongs to another project."""
    return record.runs_dir.root.resolve() != _own_runs().root.resolve()


def places_of_runs() -> list[RunsDir]:
    """List the directories of runs: this project's, then all that were used before."""
    own = _own_runs()
    real = own.root.resolve()
    return [own, *(p for p in remembered_roots() if p.root.resolve() != real)]


def _own_runs() -> RunsDir:
    cwd = working_directory(os.environ)
    try:
        run_dir = load_spec().spec.run_dir
    except UsageError:  # a job must be found even while its configuration is being edited
        run_dir = JobSpec().run_dir
    return RunsDir(root=Path(os.path.normpath(cwd / run_dir)))
