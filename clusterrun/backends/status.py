"""The status of jobs, from records, files and one query to each scheduler; never stored."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterrun.backends.base import Backend, SchedulerJob
from clusterrun.backends.evidence import (
    AttemptSummary,
    Evidence,
    TrainingProgress,
    newest_failure,
    read_attempts,
    read_evidence,
    with_output,
)
from clusterrun.backends.slurm.reasons import Outlook, PendingReason, explain
from clusterrun.diagnosis.kinds import Suspicion
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError
from clusterrun.rundir.end import Cause, End, Reason, read_end, read_request
from clusterrun.rundir.outcome import Next, Outcome
from clusterrun.rundir.record import JobRecord, continued_by
from clusterrun.rundir.usage import Sample, read_latest
from clusterrun.shared import files
from clusterrun.shared.finding import Finding
from clusterrun.shared.state import JobState


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of one job; None and "" are unknown, times are seconds since the epoch."""

    record: JobRecord
    state: JobState
    reason: str = ""  # the scheduler's reason for the state, unless the job waits
    pending: PendingReason | None = None  # why the job waits
    outlook: Outlook | None = None  # set by `outlook.explained`
    asked: SchedulerJob | None = None  # what a pending job requests now
    nodelist: str = ""
    elapsed_s: int | None = None
    limit_s: int | None = None
    expected_start: float | None = None
    start: float | None = None
    end: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    attempt: int = 0
    world_size: int | None = None  # what the ranks reported, not what was requested
    preflight: tuple[Finding, ...] = ()  # the checks that failed before the newest attempt's launch
    engine: str = ""  # what the ranks reported: ddp, fsdp or deepspeed
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    checkpoint: str | None = None
    failure: Outcome | None = None
    attempts: tuple[AttemptSummary, ...] = ()
    # The newest sample of each node of the newest attempt, set by `with_usage`.
    usage: Mapping[str, Sample] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # among others, why something is unknown
    damaged: tuple[str, ...] = ()  # files of the run that can't be read
    error: ClusterrunError | None = None  # set if the scheduler did not answer

    @property
    def suspicions(self) -> tuple[Suspicion, ...]:
        """Why a job that completed may have trained nothing."""
        newest = self.attempts[-1].outcome if self.attempts else None
        return newest.suspicions if newest and self.state.is_success else ()

    @property
    def has_checkpoint(self) -> bool:
        """Return whether this or an earlier attempt saved a complete checkpoint."""
        outcomes = (attempt.outcome for attempt in self.attempts)
        return bool(self.checkpoint) or any(o and o.checkpoint is not None for o in outcomes)


_Answer = dict[str, SchedulerJob] | SchedulerUnreachableError
"""What a scheduler answered about its jobs, or why it did not."""


def statuses(
    records: Sequence[JobRecord],
    backend_for: Callable[[JobRecord], Backend],
    *,
    max_age_s: float | None = None,
) -> list[JobStatus]:
    """Return the status of each job; query each scheduler at most once.

    Jobs whose files show that they completed are not queried. If a scheduler doesn't answer, each
    status that lacks its answer has the error.
    """
    from_files: list[tuple[JobRecord, End | None, Sequence[Path]]] = []  # with damaged files
    groups: dict[Backend, list[JobRecord]] = {}
    for record in records:
        with files.noting_damage() as damaged:
            end = read_end(record.paths)
        damage = [record.paths.record, *damaged] if record.is_damaged else damaged
        # After a time limit, the next job of the chain continues the run; it records that later.
        if record.chained_job_ids and end is not None and end.state is JobState.TIMEOUT:
            record = continued_by(record, record.chained_job_ids[0])
        from_files.append((record, end, damage))
        # A job on this machine is always queried; one that failed may have been requeued.
        is_done = end and end.state.is_success and not record.cluster.scheduler.is_this_machine
        if record.job_id and not is_done:
            groups.setdefault(backend_for(record), []).append(record)
    answers: dict[int, _Answer] = {}  # by the identity of the record
    for backend, group in groups.items():
        ids, since = [each.job_id for each in group], min(each.submitted_at for each in group)
        try:
            answer: _Answer = backend.query(ids, since=since, max_age_s=max_age_s)
        except SchedulerUnreachableError as error:
            answer = error
        answers |= {id(each): answer for each in group}
    return [
        _status_or_note(record, end, answers.get(id(record)), damage)
        for record, end, damage in from_files
    ]


def _status_or_note(
    record: JobRecord, end: End | None, answer: _Answer | None, damaged: Sequence[Path]
) -> JobStatus:
    """Return the status of a job; UNKNOWN and a note if its files can't be read.

    `damaged` are the files that were found to be damaged before.
    """
    with files.noting_damage() as found:
        try:
            status = _status(record, end, answer)
        except PermissionError as error:
            what = f"you cannot read {error.filename or error}"
            status = JobStatus(record=record, state=JobState.UNKNOWN, notes=(what,))
        except Exception as error:  # noqa: BLE001 - other jobs are shown as usual
            what = f"clusterrun failed to read this run: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                what += f"; report it with the traceback in {files.write_crash(error)}"
            status = JobStatus(record=record, state=JobState.UNKNOWN, notes=(what,))
    names = (os.path.relpath(path, record.run_dir) for path in (*damaged, *found))
    return dataclasses.replace(status, damaged=tuple(dict.fromkeys(names)))


def _status(record: JobRecord, end: End | None, answer: _Answer | None) -> JobStatus:
    """Combine what a run's files say with the scheduler's answer, which is None if not asked."""
    unknown = SchedulerJob(job_id=record.job_id, state=JobState.UNKNOWN, source="")
    job = answer.get(record.job_id, unknown) if isinstance(answer, dict) else unknown
    evidence = read_evidence(record.paths)
    state = _state(end, job, evidence)
    request = record.paths.request(evidence.attempt)
    if state is JobState.RUNNING and read_request(request) is Reason.END:
        # The scheduler may show a cancellation 30 s late. A start after it is that of a requeue.
        is_requeued = _later(job.start, request.stat().st_mtime)
        state = JobState.RUNNING if is_requeued else JobState.COMPLETING
    is_waiting, is_running = state is JobState.PENDING, state is JobState.RUNNING
    is_over = state.is_terminal
    attempts = _with_time_limit(read_attempts(record.paths, evidence.attempt), record.job_id, state)
    start = job.start or _started(attempts, evidence)
    ended = (end.ended_at if end else None) or job.end
    code, signal = _exit_of(end, job) if is_over else (None, None)
    pending = _pending(record, job, evidence) if is_waiting else None
    can_start = pending is not None and pending.can_start is not False
    elapsed_s = job.elapsed_s
    if elapsed_s is None and start is not None and ended is not None:
        elapsed_s = int(ended - start)
    # Simulated nodes share this machine, whose name is shown.
    nodes = evidence.hosts if record.cluster.scheduler.is_this_machine else evidence.nodes
    return JobStatus(
        record=record,
        state=state,
        reason=_reason(record, state, job),
        pending=pending,
        asked=job if is_waiting else None,
        nodelist=job.nodelist or ",".join(nodes),
        elapsed_s=elapsed_s,
        limit_s=job.limit_s or record.time_minutes * 60 or None,
        expected_start=job.expected_start if can_start else None,
        start=start,
        end=ended if is_over else None,
        exit_code=code,
        exit_signal=signal,
        attempt=evidence.attempt,
        world_size=evidence.world_size,
        preflight=evidence.preflight,
        engine=evidence.engine,
        progress=with_output(record.paths, evidence) if is_running else evidence.progress,
        checkpoint=evidence.checkpoint,
        failure=newest_failure(record.paths, end, attempts[-1].outcome if attempts else None, job),
        attempts=attempts,
        notes=_notes(record, state, job, answer, evidence),
        error=answer if isinstance(answer, SchedulerUnreachableError) and not is_over else None,
    )


def _exit_of(end: End | None, job: SchedulerJob) -> tuple[int | None, int | None]:
    """Return the exit status and signal of a job that has ended: the run's own, if it is known."""
    if end is None or end.exit_code is None:
        return job.exit_code, job.exit_signal
    number = end.exit_code - 128  # so a shell reports the signal (1 to 64) that ended it
    return end.exit_code, number if 0 < number < 65 else None


def _reason(record: JobRecord, state: JobState, job: SchedulerJob) -> str:
    """Return the reason for a state, usually the scheduler's; "" for a job that waits."""
    if state is JobState.COMPLETING:
        return "its processes are being stopped"
    with contextlib.suppress(OSError):
        if state is JobState.RUNNING and files.is_full(record.paths.root):
            lacks = "has no room for checkpoints, logs and the record of its end"
            return f"{lacks}: the disk of {record.paths.root} is full"
    if state is JobState.PENDING or job.state is not state:
        return ""  # `pending` explains a wait, and the reason must be that of this state
    return job.reason if job.reason != "NonZeroExitCode" else ""  # the exit status is shown


def with_last_step(job: JobStatus) -> JobStatus:
    """Add the last step of a progress bar to a job that has ended; this reads the end of a log."""
    if not job.state.is_terminal or job.progress.step is not None:
        return job
    progress = with_output(job.record.paths, read_evidence(job.record.paths))
    # `output_at` is of running jobs only.
    return dataclasses.replace(job, progress=dataclasses.replace(progress, output_at=None))


def with_usage(job: JobStatus) -> JobStatus:
    """Add what the newest attempt uses on each node; this reads the end of a file for each."""
    return dataclasses.replace(job, usage=read_latest(job.record.paths, job.attempt))


def _with_time_limit(
    attempts: tuple[AttemptSummary, ...], job_id: str, state: JobState
) -> tuple[AttemptSummary, ...]:
    """Give the last attempt the time limit as its reason, if it recorded a cancellation instead."""
    last = attempts[-1].outcome if attempts else None
    if last is None or state is not JobState.TIMEOUT:
        return attempts
    if last.cause is not Cause.CANCELLED or last.job_id != job_id:
        return attempts
    last = dataclasses.replace(last, reason=Reason.TIME_LIMIT.text)
    return (*attempts[:-1], dataclasses.replace(attempts[-1], outcome=last))


def _state(end: End | None, job: SchedulerJob, evidence: Evidence) -> JobState:
    """Choose between the state in the files and the scheduler's.

    The files show sooner that the job runs or has ended, and the scheduler forgets its state. But
    the scheduler knows better why the job failed and whether it starts again.
    """
    if job.state is JobState.UNKNOWN:
        return end.state if end else JobState.UNKNOWN
    if end is None:
        has_begun = job.state is JobState.PENDING and _later(evidence.started_at, job.asked_at)
        return JobState.RUNNING if has_begun else job.state
    if job.state.is_terminal:
        is_specific = job.state not in (JobState.FAILED, JobState.COMPLETED)  # such as TIMEOUT
        return job.state if is_specific and not end.state.is_success else end.state
    is_stale = _later(end.ended_at, job.asked_at)  # the scheduler answered before the end
    if _later(job.start, end.ended_at) or (job.state is JobState.PENDING and not is_stale):
        return job.state  # it starts again, or already has
    # The scheduler does not report the end yet. A job that Slurm ended may have been preempted:
    # only Slurm knows, after it has cleaned up.
    return JobState.COMPLETING if end.state is JobState.CANCELLED else end.state


def _later(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and one > other


def _pending(record: JobRecord, job: SchedulerJob, evidence: Evidence) -> PendingReason:
    """Explain why a job waits; only the files show that it was requeued, or continues the run."""
    reason = explain(job.reason, record.job_id)
    if reason.code == "BeginTime" and evidence.attempt > 0:
        text = "requeued; Slurm holds it for two minutes"
        return dataclasses.replace(reason, text=text, can_start=True, is_held=True)
    if reason.code == "Dependency" and record.earlier_job_ids:
        text = f"it continues the run once job {record.earlier_job_ids[-1]} has ended"
        return dataclasses.replace(reason, text=text, can_start=True)
    return reason


def _started(attempts: Sequence[AttemptSummary], evidence: Evidence) -> float | None:
    """Return when the first attempt in the newest attempt's allocation started."""
    start = evidence.started_at
    for attempt in reversed(attempts[:-1]):
        if attempt.outcome is None or attempt.outcome.next is not Next.RELAUNCH:
            break  # only a relaunch stays in the allocation
        start = attempt.outcome.started_at
    return start


def _notes(
    record: JobRecord,
    state: JobState,
    job: SchedulerJob,
    answer: _Answer | None,
    evidence: Evidence,
) -> tuple[str, ...]:
    """Return notes on a failed save and what is unknown; `answer` None: no scheduler was asked."""
    # If no rank checked for the request to save (`is_unheard`), `unsaved` says so.
    needed_no_save = state is JobState.COMPLETED and evidence.is_unheard
    notes = [evidence.unsaved] if evidence.unsaved and not needed_no_save else []
    if not record.job_id and not record.is_damaged:
        hint = "; look for it with 'squeue --me'" if record.cluster.scheduler.reads_sbatch else ""
        notes.append(f"its submission was interrupted{hint}")
    is_explained = bool(job.source or job.note)  # the scheduler knows the job, or the note says why
    if isinstance(answer, SchedulerUnreachableError) and not state.is_terminal:
        notes.append(answer.message)
    elif answer is not None and not (is_explained or state.is_terminal):
        notes.append("the scheduler no longer knows this job")
    if job.note:
        notes.append(job.note)
    return tuple(notes)
