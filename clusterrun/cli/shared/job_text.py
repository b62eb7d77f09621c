"""What several verbs print about a job: which job it is, why it waits, how it failed, when."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.diagnosis.kinds import Certainty
from clusterrun.errors import UsageError
from clusterrun.rundir.outcome import Cause, Outcome, ShortVerdict
from clusterrun.rundir.record import JobRecord, count_namesakes
from clusterrun.shared.hostlist import fold_hosts, fold_ranks, parse_hostlist
from clusterrun.verbs.find import FORWARDED, is_elsewhere, locate, refuse_elsewhere

BRIEF_LETTERS = 100
SHOWN_LETTERS = 200
_TRACEBACK = "Traceback (most recent call last):"


def find_announced(job: str | None) -> JobRecord:
    """Find a job; print which one, unless the name can mean only this run of this project."""
    return find_all_announced([job])[0]


def find_all_announced(jobs: Sequence[str | None]) -> list[JobRecord]:
    """Find jobs as `find_announced` does. Raises ElsewhereError if they are on another host."""
    found = [(job or "", locate_announced(job)) for job in jobs]
    refuse_elsewhere(found)
    return [record for _, record in found]


def locate_announced(job: str | None) -> JobRecord:
    """Find a job as `find_announced` does, wherever its run directory is."""
    record = locate(job)
    if job is None and not FORWARDED:
        where = os.path.relpath(record.runs_dir.root)
        output.say(f"using job {record.job_id} ({record.name}, newest run in {where})")
    if job is None or job in FORWARDED:  # the machine that forwarded it has announced it
        return record
    number = 1 if job != record.name or job in record.job_ids else count_namesakes(record)
    newest = f", newest of {number} runs of this name" if number > 1 else ""
    place = f" of {record.workdir}" if not os.path.exists(job) and is_elsewhere(record) else ""
    if newest or place:
        output.say(f"using job {record.job_id} ({record.name}{newest}){place}")
    return record


def failure_text(failure: Outcome) -> str:
    """Name the failure that ended an attempt, on one line."""
    return " ".join(" ".join(failure_lines(failure)).split())


def failure_lines(failure: Outcome) -> list[str]:
    """Name the failure that ended an attempt; its message keeps its lines, without tracebacks."""
    how = f"exit {failure.code}" if failure.code else ""
    if failure.signal:  # a rank's message names its signal
        how = "" if failure.cause is Cause.SIGNAL else f"killed by signal {failure.signal}"
    who = _who(failure) if failure.message else ""  # else the reason names it
    text = ": ".join(part for part in (who, how, failure.message or failure.reason) if part)
    return list(_without_tracebacks(text.splitlines()))


def _without_tracebacks(lines: Iterable[str]) -> Iterator[str]:
    is_inside = False
    for line in lines:
        is_inside = line.endswith(_TRACEBACK) or (is_inside and line[:1] in ("", " "))
        if line.strip() and not is_inside:
            yield line


def choose_attempts(name: str, known: list[int], wanted: int | str | None) -> list[int]:
    """Return the wanted of the `known` attempts, oldest first; none if the run has not started.

    Raises UsageError for one that does not exist.
    """
    if wanted is None:
        return known[-1:]
    if isinstance(wanted, str):
        return known
    number = wanted if wanted > 0 else max(known, default=0) + wanted
    if number not in known:
        hint = f"choose from {fold_ranks(known)}" if known[1:] else "choose 1"
        raise UsageError(
            f"{name} has no attempt {wanted}", hint=hint if known else "wait until it starts"
        )
    return [number]


def verdict_line(verdict: ShortVerdict) -> str:
    """Name the cause of a failure, and where it began, on one line."""
    ranks = f"rank{'s' * (len(verdict.ranks) > 1)} {fold_ranks(verdict.ranks)}"
    nodes = f"on {fold_hosts(verdict.nodes)}"
    where = " ".join((ranks,) * bool(verdict.ranks) + (nodes,) * bool(verdict.nodes))
    head = "perhaps: " if verdict.status is Certainty.UNCONFIRMED else ""
    facts = ", ".join(filter(None, (verdict.cause, where)))
    return f"{head}{verdict.means.rstrip('.')} ({facts})"


def brief(text: str) -> str:
    """Return the first line of a text, cut if it is long for a table."""
    return cut((text.splitlines() or [""])[0], BRIEF_LETTERS)


def cut(text: str, most: int = SHOWN_LETTERS) -> str:
    """Return what is shown of a line, cut between words."""
    head = text[: most + 1].rpartition(" ")[0] or text[:most]
    return text if len(text) <= most else f"{head} …"


def _who(failure: Outcome) -> str:
    if failure.rank is None:
        return f"node {failure.node}" if failure.node else ""
    return f"rank {failure.rank}" + (f" on {failure.node}" if failure.node else "")


def where_or_why(job: JobStatus) -> str:
    """Return where a job runs, or why it waits."""
    if job.pending is None:
        is_local = job.record.cluster.scheduler.is_this_machine
        return f"{nodelist(job)} (simulated nodes)" if is_local and job.nodelist else nodelist(job)
    start = f"; starts about {local_time(job.expected_start)}" if job.expected_start else ""
    return f"{job.pending.text}{start}"


def nodelist(job: JobStatus) -> str:
    """Name the hosts of a job in Slurm's short form, each once: simulated nodes share one."""
    try:
        return fold_hosts(parse_hostlist(job.nodelist))
    except UsageError:
        return job.nodelist


SECONDS_A_DAY = 86400


def local_time(epoch_s: float) -> str:
    """Write a moment in local time, without the day if it is less than half a day away."""
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs((then - datetime.now()).total_seconds()) < SECONDS_A_DAY / 2
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"


def timestamp(epoch_s: float | None) -> str | None:
    """Write a time as RFC 3339 in UTC.

    >>> timestamp(0.25), timestamp(None)
    ('1970-01-01T00:00:00.250Z', None)
    """
    if epoch_s is None:
        return None
    then = datetime.fromtimestamp(epoch_s, timezone.utc)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")
