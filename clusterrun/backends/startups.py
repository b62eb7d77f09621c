"""Add to a job's status where the starts of its attempts spent their time."""

from __future__ import annotations

import dataclasses

from clusterrun.backends.attempts import AttemptSummary
from clusterrun.backends.status import JobStatus
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.startup import Phase, Startup, read_ends, startup_of


def with_startups(job: JobStatus) -> JobStatus:
    """Add the start of each attempt; this reads one small file for each."""
    pairs = zip((None, *job.attempts), job.attempts, strict=False)
    attempts = (
        dataclasses.replace(attempt, startup=_startup(job, before, attempt))
        for before, attempt in pairs
    )
    return dataclasses.replace(job, attempts=tuple(attempts))


def _startup(
    job: JobStatus, before: AttemptSummary | None, attempt: AttemptSummary
) -> Startup | None:
    ends = read_ends(job.record.paths, attempt.number)
    if not ends:
        return None
    last = before.outcome if before else None
    since: float | None
    if last is not None and last.next is not Next.STOP:
        since = last.failed_at or last.ended_at
        ends |= {Phase.STOP: last.ended_at} if last.failed_at else {}
    else:
        since = job.record.resumed_at if before else job.record.submitted_at
        since = since if since and since < max(ends.values()) else None  # of a later resume
    is_relaunch = last is not None and last.next is Next.RELAUNCH
    if attempt is job.attempts[-1] and _is_between(since, job.start, ends.get(Phase.PROLOG)):
        ends.setdefault(Phase.QUEUE, job.start or 0.0)
    if is_relaunch:
        ends.pop(Phase.QUEUE, None)
    if Phase.PROLOG in ends and Phase.QUEUE not in ends:
        ends[Phase.DECISION if is_relaunch else Phase.QUEUE] = ends.pop(Phase.PROLOG)
    is_restart = last is not None and last.next is not Next.STOP
    return startup_of(ends, since, is_restart=is_restart)


def _is_between(low: float | None, at: float | None, high: float | None) -> bool:
    """Return whether a job's start is the scheduler's; without one it is an agent's."""
    return None not in (low, at, high) and (low or 0.0) <= (at or 0.0) <= (high or 0.0)
