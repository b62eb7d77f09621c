"""Name the job that a command took, and report that a requeued one starts now."""

from __future__ import annotations

import os

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.rundir.record import JobRecord
from clusterrun.verbs.find import find_record


def find_announced(job: str | None) -> JobRecord:
    """Find a job; print which one was taken if none was named."""
    record = find_record(job)
    if job is None:
        where = os.path.relpath(record.runs_dir.root)
        output.say(f"using job {record.job_id} ({record.name}, newest run in {where})")
    return record


def say_released(job: JobStatus) -> None:
    """Print that a requeued job need not wait."""
    output.say(released(f"job {job.record.job_id}"))


def released(title: str) -> str:
    """Return the sentence that a requeued job need not wait."""
    return f"{title} was requeued; Slurm was asked to start it now, not in two minutes"
