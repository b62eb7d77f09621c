"""End jobs, immediately or after their ranks have saved a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from clusterrun.backends import select
from clusterrun.backends.base import Backend
from clusterrun.backends.evidence import read_evidence
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import ClusterrunError, JobNotFoundError, UsageError
from clusterrun.rundir import record as records
from clusterrun.rundir.end import Cause, Reason, read_end, write_request
from clusterrun.rundir.outcome import Next, read_outcome
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import checkpoint_files, files
from clusterrun.shared.state import JobState
from clusterrun.verbs.find import Which, find_record
from clusterrun.verbs.status import quick_status

POLL_S: Final = 0.5
ASK_S: Final = 10.0  # between two queries of the scheduler
UNHEARD_S: Final = 60.0  # for ranks that have never called should_checkpoint
END_S: Final = 15.0  # from the end of an attempt to the end of its job
SUBMIT_S: Final = 30.0  # for the submission of a successor


def cancel(*jobs: Which) -> list[JobStatus]:
    """End jobs, and return the status that each had before. Jobs that have ended do not change.

    Raises UsageError if no job is given, and JobNotFoundError before any job is ended.
    """
    found = jobs_to_cancel(*jobs)
    end_now(found)
    return found


def jobs_to_cancel(*jobs: Which) -> list[JobStatus]:
    """Return the status of the jobs to end, each once. Raises UsageError, JobNotFoundError."""
    if not jobs or not all(jobs):
        raise UsageError("no job given", hint="name a job that clusterrun list shows")
    found = {record.run_dir: records.read_again(record) for record in map(find_record, jobs)}
    for record in found.values():
        if not record.job_id:
            text = f"run {record.run_id} has no job id: its submission was interrupted"
            is_slurm = record.cluster.scheduler.reads_sbatch
            raise JobNotFoundError(text, hint="look for it with 'squeue --me'" if is_slurm else ())
    return statuses(list(found.values()), select.backend_of, max_age_s=0)


def end_now(jobs: Sequence[JobStatus]) -> None:
    """End the active jobs and their chains, with one request to each scheduler."""
    groups: dict[Backend, list[str]] = {}
    for job in jobs:
        ids = groups.setdefault(select.backend_of(job.record), [])
        if not job.state.is_terminal:
            ids.append(job.record.job_id)
        ids += active_chain(job.record)
    for scheduler, job_ids in groups.items():
        if job_ids:
            scheduler.cancel(job_ids)
    for job in jobs:
        if job.state is JobState.RUNNING and job.attempt:  # `status` shows it immediately
            write_request(job.record.paths.request(job.attempt), Reason.END)
        _end_successor(job)


def _end_successor(job: JobStatus) -> None:
    """End the job that has taken over the run in the meantime, or is about to."""
    record, paths = job.record, job.record.paths
    # A job that had ended has submitted its successor already.
    deadline = time.monotonic() + (0 if job.state.is_terminal else SUBMIT_S)
    while True:
        last = read_outcome(paths, paths.newest_attempt()) if read_end(paths) is None else None
        current = records.read_again(record)
        if record.job_id in current.earlier_job_ids:  # another job has taken over
            select.backend_of(current).cancel([current.job_id])
            return
        submits = last is not None and (last.job_id, last.next) == (record.job_id, Next.SUCCESSOR)
        if not submits or time.monotonic() >= deadline:  # no other job comes in time
            return
        time.sleep(POLL_S)


def active_chain(record: JobRecord) -> list[str]:
    """List the later, active jobs of a run's chain. Raises SchedulerUnreachableError."""
    active = active_jobs([record]) if record.chained_job_ids else set()
    return [job_id for job_id in record.chained_job_ids if job_id in active]


def active_jobs(found: Sequence[JobRecord]) -> set[str]:
    """Ask the scheduler which jobs have not ended. Raises SchedulerUnreachableError."""
    # The files of a run do not show that a job which had ended was requeued.
    groups: dict[Backend, list[JobRecord]] = {}
    for record in found:
        groups.setdefault(select.backend_of(record), []).append(record)
    active: set[str] = set()
    for backend, group in groups.items():
        ids = [job_id for each in group for job_id in (each.job_id, *each.chained_job_ids)]
        jobs = backend.query(ids, since=min(each.submitted_at for each in group), max_age_s=0)
        known = {job_id: job.state for job_id, job in jobs.items() if job.source}  # by a scheduler
        active |= {job_id for job_id, state in known.items() if not state.is_terminal}
    return active


def ask_to_save_and_exit(job: JobStatus) -> bool:
    """Ask ranks to save and exit, and end the chain; False if none runs. Raises ClusterrunError."""
    if job.state is not JobState.RUNNING or not job.attempt:
        return False
    backend = select.backend_of(job.record)
    if later := active_chain(job.record):
        backend.cancel(later)
    path = job.record.paths.request(job.attempt)
    try:
        with contextlib.suppress(FileExistsError):  # requested before: the ranks are saving
            files.create(path, f"{Reason.CANCEL.value}\n")
    except OSError as error:
        raise ClusterrunError(f"cannot write {path}", cause=str(error)) from error
    return True


def await_exits(
    asked: Sequence[JobStatus], *, timeout_s: float, unheard_s: float
) -> Iterator[list[JobStatus]]:
    """Wait until the attempts of jobs have ended; before each pause, yield the jobs still awaited.

    Wait at most `timeout_s`, and `unheard_s` for a job whose ranks never called should_checkpoint.
    """
    begin, waiting = time.monotonic(), list(asked)
    ask_at = begin + ASK_S
    end_by: dict[str, float] = {}  # when a job whose attempt has ended is no longer awaited
    while waiting and (now := time.monotonic()) < begin + timeout_s:
        is_due = now >= ask_at
        ask_at = now + ASK_S if is_due else ask_at
        for job in tuple(waiting):
            paths = job.record.paths
            if paths.outcome(job.attempt).exists():
                end_by.setdefault(job.record.run_dir, now + END_S)
            if (
                read_end(paths) is not None  # the run has ended
                or now > end_by.get(job.record.run_dir, now)  # its job is late to end
                or (now > begin + unheard_s and read_evidence(paths).is_unheard)  # it will not save
                or (is_due and quick_status(job.record).state.is_terminal)  # killed, perhaps
            ):
                waiting.remove(job)
        if waiting:
            yield waiting
            time.sleep(POLL_S)


def newest_checkpoint(job: JobStatus, asked_at: float) -> tuple[Path | None, float, bool]:
    """Return the newest checkpoint of a run, its time, and whether the ranks exited with it.

    Without a checkpoint: None, and whether the script's own signal handlers ended the ranks. A
    script that saves periodically may have saved after `asked_at` and continued: its ranks did not
    exit. A script that reports its own checkpoints is trusted.
    """
    paths = job.record.paths
    evidence, outcome = read_evidence(paths), read_outcome(paths, job.attempt)
    path = Path(evidence.checkpoint) if evidence.checkpoint else None
    saved_at = evidence.checkpoint_at or 0.0
    directory = path.parent if path else paths.checkpoints_dir
    found, _ = checkpoint_files.newest(directory, contents=False)
    if found is not None and found.saved_at > saved_at:
        path, saved_at = found.path, found.saved_at
    if path is None:
        return None, saved_at, outcome is not None and outcome.is_handled
    has_exited = outcome is not None and outcome.cause is Cause.INTERRUPTED
    return path, saved_at, has_exited and saved_at >= asked_at


def has_completed(record: JobRecord) -> bool:
    """Return whether a run has completed."""
    end = read_end(record.paths)
    return end is not None and end.state is JobState.COMPLETED
