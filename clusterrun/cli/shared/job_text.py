"""What several verbs print about a job: which job it is, why it waits, how it failed, when."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from clusterrun.backends.evidence import AttemptSummary
from clusterrun.backends.slurm.reasons import Fact, FactKind, Sooner
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.diagnosis.kinds import Certainty
from clusterrun.errors import UsageError
from clusterrun.rundir.outcome import Cause, Outcome, ShortVerdict
from clusterrun.rundir.record import JobRecord, count_namesakes
from clusterrun.shared.durations import clock
from clusterrun.shared.hostlist import fold_hosts, fold_ranks, parse_hostlist
from clusterrun.shared.wording import count
from clusterrun.verbs.find import FORWARDED, is_elsewhere, locate, refuse_elsewhere

BRIEF_LETTERS = 100
SECONDS_A_DAY = 86400
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


def how_it_ended(outcome: Outcome, why: str = "") -> str:
    """Return why an attempt ended, or its cause, and at which step."""
    how = why or outcome.cause.value.replace("_", " ")
    return how if outcome.step is None else f"{how} at step {outcome.step}"


def lost_steps(attempt: AttemptSummary) -> str:
    """Return how many steps were lost, and about how much time."""
    about = f" (about {clock(attempt.lost_s)})" if attempt.lost_s is not None else ""
    return f"{count(attempt.lost_steps or 0, 'step')}{about}"


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


def local_time(epoch_s: float) -> str:
    """Write a moment in local time, without the day if it is less than half a day away."""
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs((then - datetime.now()).total_seconds()) < SECONDS_A_DAY / 2
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"


# Why it waits


def facts(job: JobStatus) -> list[str]:
    """Return a sentence for each fact about a wait."""
    return [fact_text(fact) for fact in job.outlook.facts] if job.outlook else []


def fact_text(fact: Fact) -> str:
    """Return one fact in words, with the request and the limit."""
    where = f"partition '{fact.partition}'"
    with_gpus = f" with {fact.detail} GPUs" if fact.detail else ""
    asked = f"{count(fact.asked or 0, 'node')}{with_gpus}"
    if fact.kind is FactKind.NODES:
        uses = ", ".join(f"{number} {use.value}" for use, number in fact.uses)
        return f"needs {asked}; {where} has {fact.limit}: {uses}"
    if fact.kind is FactKind.NODES_OUT:
        reason = f": {fact.detail}" if fact.detail else ""
        are = "are" if {*"[,"} & {*fact.nodes} else "is"
        return f"{fact.nodes} {are} {fact.state}{reason}"
    if fact.kind is FactKind.RESERVATION:
        kind = f"{fact.state} reservation" if fact.state else "reservation"
        nodes = f" of {fact.nodes}" if fact.nodes else ""
        span = f"from {local_time(fact.start or 0)} to {local_time(fact.end or 0)}"
        return f"{kind} '{fact.detail}'{nodes}: {span}"
    if fact.kind is FactKind.TOO_LONG:
        asked = "no --time" if fact.asked is None else f"--time {clock(fact.asked)}"
        return f"{asked}, {where} allows {clock(fact.limit or 0)}"
    return f"{asked} requested, {where} offers at most {fact.limit}"


def sooner(job: JobStatus) -> list[str]:
    """Return what may start sooner, each with its command; at the end, how to drop this job."""
    changes = job.outlook.sooner if job.outlook else ()
    lines = [f"{_why(change)}: {command(change, job)}" for change in changes]
    if lines and not job.has_checkpoint:
        lines.append(
            f"that starts a new run; to drop this job: clusterrun cancel {job.record.job_id}"
        )
    return lines


def _why(change: Sooner) -> str:
    if change.idle is None:
        return f"with a time limit of {clock(change.limit_s or 0)}"
    are = f"{count(change.idle, 'node')} {'is' if change.idle == 1 else 'are'} idle now"
    where = f" in partition '{change.partition}'" if change.partition else ""
    limit = f", for at most {clock(change.limit_s)}" if change.limit_s else ""
    return f"{are}{where}{limit}"


def command(change: Sooner, job: JobStatus) -> str:
    """Return the command that requests the change.

    `resubmit` trains from the first step, so a run with a checkpoint is resumed instead.
    """
    limit = clock(change.limit_s) if change.limit_s else ""
    given = {"--partition": change.partition, "--nodes": change.nodes, "--time": limit}
    options = shlex.join(x for name, value in given.items() if value for x in (name, str(value)))
    name = job.record.job_id
    if job.has_checkpoint:
        return f"clusterrun cancel {name} && clusterrun resume {name} {options}"
    return f"clusterrun resubmit {name} {options}"


def warn_stuck(job: JobStatus) -> None:
    """Warn about a job that will not start unless somebody changes something."""
    notes = (*facts(job), f"to end it, run: clusterrun cancel {job.record.job_id}")
    output.warn(f"job {job.record.job_id} is pending: {where_or_why(job)}", notes=notes)
