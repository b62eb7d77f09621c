"""Look up the status of a job or of all jobs, and wait until a job has ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from clusterrun.backends import select
from clusterrun.backends.evidence import AttemptSummary
from clusterrun.backends.slurm.outlook import explained
from clusterrun.backends.status import JobStatus, statuses, with_last_step, with_usage
from clusterrun.rundir.events import Phase, Startup, read_start, startup_of
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.record import JobRecord, list_records, read_again
from clusterrun.shared.state import JobState
from clusterrun.verbs.find import Which, find_record, places_of_runs

POLL_S: Final = 0.5  # reads only files; a scheduler is asked at most every 10 s
POLL_MOST_S: Final = 5.0  # between two checks of an unchanged job
POLL_GROWTH: Final = 1.1
FORGOTTEN_S: Final = 30.0  # accounting lags behind slurmctld by seconds


def status(job: Which | None = None, *, max_age_s: float | None = None) -> JobStatus:
    """Return the status of a job; a scheduler's answers may be `max_age_s` old.

    Raises JobNotFoundError. If the scheduler does not answer, the status has an `error`.
    """
    return with_startups(with_usage(quick_status(find_record(job), max_age_s=max_age_s)))


def quick_status(record: JobRecord, *, max_age_s: float | None = None) -> JobStatus:
    """Return the status of a job without what its nodes use and how its attempts started."""
    (found,) = statuses([read_again(record)], select.backend_of, max_age_s=max_age_s)
    return with_last_step(found)


def statuses_explained(records: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of jobs, by one query for all and another for those that wait."""
    found = statuses([read_again(record) for record in records], select.backend_of)
    return [explained(with_startups(with_usage(with_last_step(job)))) for job in found]


def poll(record: JobRecord) -> Iterator[tuple[JobStatus, bool, float]]:
    """Yield, again and again, the status of a job, whether it is over, and how long to pause.

    The pause is short after a change, and grows while nothing changes. A job is over if it has
    ended, or has not been found for FORGOTTEN_S.
    """
    known_at, pause_s = time.monotonic(), POLL_S
    state: JobState | None = None
    while True:
        now = quick_status(record)
        if now.error or now.state is not JobState.UNKNOWN:
            known_at = time.monotonic()
        if now.state.is_terminal and not now.state.is_success:
            now = quick_status(record, max_age_s=0)  # it may be starting again
        is_over = now.state.is_terminal or time.monotonic() - known_at > FORGOTTEN_S
        pause_s = min(POLL_MOST_S, pause_s * POLL_GROWTH) if now.state is state else POLL_S
        state = now.state
        yield now, is_over, pause_s


def wait(
    job: Which | None = None,
    *,
    timeout_s: float | None = None,
    stuck: Callable[[JobStatus], None] = lambda _: None,
    rest: Callable[[JobStatus, float], None] = lambda _, pause_s: time.sleep(pause_s),
) -> JobStatus:
    """Wait until a job has ended and return its last status.

    `stuck` is called once for each reason why the job cannot start without a change. `rest` pauses
    between two queries. The last state is UNKNOWN if the job can no longer be found. Raises
    JobNotFoundError, and TimeoutError after `timeout_s`.
    """
    record = find_record(job)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    polled, reported = poll(record), ""
    while True:
        now, is_over, pause_s = next(polled)
        if now.pending and now.pending.can_start is False and now.pending.code != reported:
            reported = now.pending.code
            stuck(explained(now))
        if is_over:
            return with_startups(with_usage(now))
        if time.monotonic() >= deadline:
            raise TimeoutError(f"job {record.job_id} is {now.state.value} after {timeout_s} s")
        rest(now, pause_s)


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
    """Return the phases of an attempt's start; `before` is the attempt before it."""
    ends = read_start(job.record.paths, attempt.number)  # when each phase ended
    if not ends:
        return None
    outcome = before.outcome if before else None
    last = outcome if outcome and outcome.next is not Next.STOP else None  # None: no restart
    if last is None:
        since = job.record.resumed_at if before else job.record.submitted_at
    elif last.cause.is_failure and last.failed_at:
        since, ends[Phase.STOP] = last.failed_at, last.ended_at  # STOP is between these
    else:
        since = last.ended_at
    begin = since if 0 < since < max(ends.values()) else None  # a later time is of a new resume
    if last is not None and last.next is Next.RELAUNCH:
        _keep_phases_of_relaunch(ends)
    elif Phase.PROLOG in ends:
        _part_queue_from_prolog(ends, begin, job.start)
    return startup_of(ends, begin, is_restart=last is not None)


def _keep_phases_of_relaunch(ends: dict[Phase, float]) -> None:
    """Remove queue and staging, which a relaunch skips; it has a decision instead of a prolog."""
    for phase in (Phase.QUEUE, Phase.STAGE):
        ends.pop(phase, None)
    if Phase.PROLOG in ends:
        ends[Phase.DECISION] = ends.pop(Phase.PROLOG)


def _part_queue_from_prolog(
    ends: dict[Phase, float], begin: float | None, start: float | None
) -> None:
    """End the queue at the job's `start`; if that is unknown, count the prolog as queue."""
    # A scheduler reports the start in whole seconds, so that it may seem to precede the queue.
    if begin is not None and start is not None and begin - 1 < start <= ends[Phase.PROLOG]:
        ends.setdefault(Phase.QUEUE, start)
    if Phase.QUEUE not in ends:
        ends[Phase.QUEUE] = ends.pop(Phase.PROLOG)


def list_jobs(*, limit: int | None = None) -> list[JobStatus]:
    """Return the status of each run of this project, newest first; outside a project, of all runs.

    `limit` is the largest number of runs to return.
    """
    own, *others = places_of_runs()
    found = list_records(own, limit, with_damaged=True)
    if not found:
        known = (list_records(place, limit, with_damaged=True) for place in others)
        found = sorted(chain(*known), key=lambda record: record.age_key, reverse=True)[:limit]
    jobs = statuses([each for each in found if each.home is None], select.backend_of)
    if on_other_hosts := [each for each in found if each.home]:
        from clusterrun.backends.hosts import homes  # slow to import

        jobs += homes.ask(on_other_hosts)
    return sorted(jobs, key=lambda job: job.record.age_key, reverse=True)
