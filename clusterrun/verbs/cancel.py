"""End jobs: at once, or once their ranks have saved a checkpoint and left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterrun.backends import select
from clusterrun.backends.base import Backend
from clusterrun.backends.evidence import read_evidence
from clusterrun.backends.slurm.query import is_known
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import ClusterrunError, JobNotFoundError, UsageError
from clusterrun.rundir import record as records
from clusterrun.rundir.end import read_end
from clusterrun.rundir.outcome import Cause, Next, Reason, read_outcome
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import checkpoint_files, files
from clusterrun.shared.state import JobState
from clusterrun.verbs.find import Which, find_record
from clusterrun.verbs.status import status

POLL_S: Final = 0.5
ASK_S: Final = 10.0  # between two questions to the scheduler
END_S: Final = 15.0  # from the end of an attempt to that of its job
SUBMIT_S: Final = 30.0  # for the submission of a successor


# At once


def cancel(*jobs: Which) -> list[JobStatus]:
    """End jobs and say how each stood before; one that had ended already stays as it is.

    Raises UsageError for no job at all, JobNotFoundError before any is ended.
    """
    seen = look_before_cancel(*jobs)
    cancel_seen(seen)
    return seen


def look_before_cancel(*jobs: Which) -> list[JobStatus]:
    """Find jobs that are to be ended, each once, and say how they stand.

    Raises UsageError for no job at all, JobNotFoundError for one that can't be found or ended.
    """
    if not jobs or not all(jobs):
        raise UsageError("no job was named", hint="clusterrun list shows them")
    found = {record.run_dir: records.read_again(record) for record in map(find_record, jobs)}
    for record in found.values():
        if not record.job_id:
            raise JobNotFoundError(
                f"run {record.run_id} has no job id: its submission was interrupted",
                hint="look for it with 'squeue --me'",
            )
    return statuses(list(found.values()), select.backend_of, max_age_s=0)


def cancel_seen(seen: Sequence[JobStatus]) -> None:
    """End the jobs of some statuses that have not ended, asking each scheduler once.

    Of a chain, all jobs.
    """
    groups: dict[Backend, list[str]] = {}
    for entry in seen:
        ids = groups.setdefault(select.backend_of(entry.record), [])
        ids += [] if entry.state.is_terminal else [entry.record.job_id]
        ids += active_chain(entry.record)
    for scheduler, job_ids in groups.items():
        if job_ids:
            scheduler.cancel(job_ids)
    for entry in seen:
        _end_successor(entry)


def _end_successor(seen: JobStatus) -> None:
    """End the job by which the run has gone on since it was seen, or is just about to."""
    record = seen.record
    deadline = time.monotonic() + (0 if seen.state.is_terminal else SUBMIT_S)
    while True:
        is_awaited = _is_submitting(record) and time.monotonic() < deadline
        newest = records.read_again(record)
        if record.job_id in newest.earlier_job_ids:
            select.backend_of(newest).cancel([newest.job_id])
        elif is_awaited:
            time.sleep(POLL_S)
            continue
        return


def _is_submitting(record: JobRecord) -> bool:
    """Say whether a job has decided on a successor, and has not ended without one."""
    paths = record.paths
    if read_end(paths) is not None:
        return False
    outcome = read_outcome(paths, paths.newest_attempt())
    return (
        outcome is not None and outcome.job_id == record.job_id and outcome.next is Next.SUCCESSOR
    )


def end_chain(record: JobRecord) -> None:
    """End the later jobs of a run's chain, and leave its own."""
    later = active_chain(record)
    if later:
        select.backend_of(record).cancel(later)


def active_chain(record: JobRecord) -> list[str]:
    """List the later jobs of a run's chain that have not ended.

    Raises SchedulerUnreachableError.
    """
    if not record.chained_job_ids:
        return []
    backend = select.backend_of(record)
    jobs = backend.query(
        record.chained_job_ids, since=record.submitted_at, max_age_s=0, own=record.is_own
    )
    found = {job_id: jobs.get(job_id) for job_id in record.chained_job_ids}
    return [
        job_id
        for job_id, job in found.items()
        if job and is_known(job) and not job.state.is_terminal
    ]


# After a checkpoint


def ask_to_leave(seen: JobStatus) -> bool:
    """Have the ranks of a job save and leave for good; False where none runs.

    What waits behind it in a chain ends at once.
    Raises ClusterrunError where the job can't be told.
    """
    if seen.state is not JobState.RUNNING or not seen.attempt:
        return False
    record = seen.record
    end_chain(record)
    _write_request(seen)
    select.backend_of(record).interrupt(record.job_id)
    return True


def _write_request(seen: JobStatus) -> None:
    """Leave word for the agents; where somebody else has done so, the ranks save already."""
    path = seen.record.paths.request(seen.attempt)
    try:
        with contextlib.suppress(FileExistsError):
            files.create(path, f"{Reason.CANCEL.value}\n")
    except OSError as error:
        raise ClusterrunError(f"cannot write {path}", cause=str(error)) from error


def wait_until_left(
    asked: Sequence[JobStatus],
    *,
    timeout_s: float,
    watch: Callable[[Sequence[JobStatus]], None] = lambda _: None,
) -> None:
    """Wait until the attempts of jobs have ended, at most `timeout_s`.

    `watch` is given those that have not, at each look.
    """
    deadline = time.monotonic() + timeout_s
    looks = [_Look(seen) for seen in asked]
    while time.monotonic() < deadline:
        looks = [look for look in looks if not look.has_left()]
        watch([look.seen for look in looks])
        if not looks:
            return
        time.sleep(POLL_S)


class _Look:
    """Looks whether one job has left: at its files, and now and then at its scheduler."""

    def __init__(self, seen: JobStatus) -> None:
        self.seen = seen
        self._ask_at = time.monotonic() + ASK_S
        self._end_by = float("inf")

    def has_left(self) -> bool:
        paths, now = self.seen.record.paths, time.monotonic()
        if read_end(paths) is not None:
            return True
        if paths.outcome(self.seen.attempt).exists():
            self._end_by = min(self._end_by, now + END_S)
        if now < self._ask_at:
            return now > self._end_by
        self._ask_at = now + ASK_S
        return now > self._end_by or status(self.seen.record).state.is_terminal


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A run's newest checkpoint, when it was saved, and whether the ranks left with it."""

    path: Path
    at: float
    is_last: bool


def saved_since(seen: JobStatus, asked_at: float) -> SavedState | None:
    """Find the newest checkpoint of a run, and whether the ranks left with it since then.

    A script that saves now and then by itself may have done so meanwhile, and gone on. One that
    saves in its own way is believed.
    """
    paths = seen.record.paths
    evidence = read_evidence(paths)
    told, at = evidence.checkpoint, evidence.checkpoint_at
    directory = Path(told).parent if told else paths.checkpoints_dir
    found, _ = checkpoint_files.newest(directory, contents=False)
    if found is not None and (at is None or found.saved_at > at):
        told, at = str(found.path), found.saved_at
    if told is None or at is None:
        return None
    outcome = read_outcome(paths, seen.attempt)
    has_left = outcome is not None and outcome.cause is Cause.INTERRUPTED
    return SavedState(path=Path(told), at=at, is_last=has_left and at >= asked_at)


def unsaved(record: JobRecord) -> str:
    """Say what keeps a run from saving; empty where nothing is known to."""
    return read_evidence(record.paths).unsaved


def has_completed(record: JobRecord) -> bool:
    """Say whether a run has come to its end by itself."""
    end = read_end(record.paths)
    return end is not None and end.state is JobState.COMPLETED
