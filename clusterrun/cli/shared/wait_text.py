"""Why a job waits and what would start sooner, in words and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from clusterrun.backends.slurm.reasons import Fact, FactKind, Sooner
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import local_time, timestamp, where_or_why
from clusterrun.shared.durations import clock
from clusterrun.shared.wording import count


def facts(job: JobStatus) -> list[str]:
    """Return a sentence for each fact about a wait."""
    return [fact_text(fact) for fact in job.outlook.facts] if job.outlook else []


def fact_text(fact: Fact) -> str:
    """Return one fact in words, with the request and the limit."""
    if fact.kind is FactKind.NODES:
        uses = ", ".join(f"{number} {use.value}" for use, number in fact.uses)
        kind = f" with {fact.detail} GPUs" if fact.detail else ""
        return (
            f"needs {count(fact.asked or 0, 'node')}{kind}; "
            f"partition '{fact.partition}' has {fact.limit}: {uses}"
        )
    if fact.kind is FactKind.NODES_OUT:
        reason = f": {fact.detail}" if fact.detail else ""
        are = "are" if {*"[,"} & {*fact.nodes} else "is"
        return f"{fact.nodes} {are} {fact.state}{reason}"
    if fact.kind is FactKind.RESERVATION:
        kind = f"{fact.state} reservation" if fact.state else "reservation"
        nodes = f" of {fact.nodes}" if fact.nodes else ""
        span = f"from {local_time(fact.start or 0)} to {local_time(fact.end or 0)}"
        return f"{kind} '{fact.detail}'{nodes}: {span}"
    where = f"partition '{fact.partition}'"
    if fact.kind is FactKind.TOO_LONG:
        asked = "no --time" if fact.asked is None else f"--time {clock(fact.asked)}"
        return f"{asked}, {where} allows {clock(fact.limit or 0)}"
    asked = f"{count(fact.asked or 0, 'node')}{f' with {fact.detail} GPUs' if fact.detail else ''}"
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
    name, options = job.record.job_id, shlex.join(_options(change))
    if job.has_checkpoint:
        return f"clusterrun cancel {name} && clusterrun resume {name} {options}"
    return f"clusterrun resubmit {name} {options}"


def _options(change: Sooner) -> Iterator[str]:
    if change.partition:
        yield from ("--partition", change.partition)
    if change.nodes:
        yield from ("--nodes", str(change.nodes))
    if change.limit_s:
        yield from ("--time", clock(change.limit_s))


def warn_stuck(job: JobStatus) -> None:
    """Warn about a job that will not start unless somebody changes something."""
    notes = (*facts(job), f"to end it, run: clusterrun cancel {job.record.job_id}")
    output.warn(f"job {job.record.job_id} is pending: {where_or_why(job)}", notes=notes)


# For programs


def outlook_object(job: JobStatus) -> dict[str, Any]:
    """Describe the facts and the changes for JSON; both are empty unless they were asked for."""
    told, changes = (job.outlook.facts, job.outlook.sooner) if job.outlook else ((), ())
    facts = [
        {
            **_described(fact),
            "text": fact_text(fact),
            "uses": {use.name.lower(): number for use, number in fact.uses},
            "start": timestamp(fact.start),
            "end": timestamp(fact.end),
        }
        for fact in told
    ]
    sooner = [
        {"kind": one.kind, **_described(one), "command": command(one, job)} for one in changes
    ]
    return {"facts": facts, "sooner": sooner}


def _described(what: Fact | Sooner) -> dict[str, Any]:
    """Return the fields; an empty text is unknown, as is None."""
    return {name: None if value == "" else value for name, value in vars(what).items()}
