"""Add to a job's status where the starts of its attempts spent their time."""

from __future__ import annotations

import dataclasses

from clusterrun.backends.attempts import AttemptSummary
from clusterrun.backends.status import JobStatus
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.startup import Phase, Startup, read_start, startup_of


def with_startups(job: JobStatus) -> JobStatus:
    """Add the start of each attempt; this reads one small file for each."""
    attempts = (
        dataclasses.replace(attempt, startup=_startup(job, before, attempt))
        for before, attempt in zip((None, *job.attempts), job.attempts, strict=False)
    )
    return dataclasses.replace(job, attempts=tuple(attempts))


def _startup(
    job: JobStatus, before: AttemptSummary | None, attempt: AttemptSummary
) -> Startup | None:
    ends, not_forked = read_start(job.record.paths, attempt.number)
    if not ends:
        return None
    outcome = before.outcome if before else None
    last = outcome if outcome and outcome.next is not Next.STOP else None
    if last is None:
        since = job.record.resumed_at if before else job.record.submitted_at
    elif last.cause.is_failure and last.failed_at:
        since, ends[Phase.STOP] = last.failed_at, last.ended_at
    else:
        since = last.ended_at
    begin = since if 0 < since < max(ends.values()) else None  # else of a later resume
    if last is not None and last.next is Next.RELAUNCH:
        for phase in (Phase.QUEUE, Phase.STAGE):
            ends.pop(phase, None)  # of an earlier attempt
        _rename(ends, Phase.PROLOG, Phase.DECISION)
    else:
        if _has_started_between(job, begin, ends.get(Phase.PROLOG)):
            ends.setdefault(Phase.QUEUE, job.start or 0.0)
        if Phase.QUEUE not in ends:
            _rename(ends, Phase.PROLOG, Phase.QUEUE)
    return startup_of(ends, begin, is_restart=last is not None, not_forked=not_forked)


def _rename(ends: dict[Phase, float], old: Phase, new: Phase) -> None:
    if old in ends:
        ends[new] = ends.pop(old)


def _has_started_between(job: JobStatus, low: float | None, high: float | None) -> bool:
    """Return whether the scheduler reported the job's start; otherwise it is an agent's."""
    if low is None or job.start is None or high is None:
        return False
    return low - 1 < job.start <= high  # Slurm drops the fraction of a second
