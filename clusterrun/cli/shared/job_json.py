"""A job and its attempts as JSON."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from clusterrun.backends.evidence import AttemptSummary
from clusterrun.backends.slurm.reasons import Fact, Outlook, PendingReason, Sooner
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared.job_text import command, fact_text, nodelist
from clusterrun.cli.shared.progress_text import eta_s, output_age_s
from clusterrun.rundir.outcome import Outcome
from clusterrun.rundir.startup import Startup
from clusterrun.shared.hostlist import named

_OF_RECORD = ("name", "run_id", "nodes", "world_size", "earlier_job_ids", "chained_job_ids")
_OF_JOB = ("attempt", "elapsed_s", "limit_s", "checkpoint", "notes", "damaged")


def job_object(job: JobStatus) -> dict[str, Any]:
    """Describe a job for JSON; null is unknown."""
    record = job.record
    pending = job.pending or PendingReason(code=job.reason, text=job.reason, can_start=None)
    said = {name: getattr(pending, name) for name in ("code", "text", "can_start")}
    return {
        "job_id": record.job_id or None,
        **{name: getattr(record, name) for name in _OF_RECORD},
        **{name: getattr(job, name) for name in _OF_JOB},
        **{name: timestamp(getattr(job, name)) for name in ("expected_start", "start", "end")},
        "run_dir": (record.home or record).run_dir,
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        **end_object(job),
        "reason": {**said, **outlook_object(job)} if pending.code else None,
        "suspicions": [{"kind": each.kind.value, "text": each.text} for each in job.suspicions],
        "nodelist": nodelist(job) or None,
        "gpus": record.nodes * record.gpus_per_node,
        "proven_world_size": job.world_size,
        "unjoined": vars(job.unjoined) if job.unjoined else None,
        "preflight": [{**each.to_data(), "nodes": named(each.nodes)} for each in job.preflight],
        "engine": job.engine or None,
        "submitted": timestamp(record.submitted_at),
        "progress": _progress(job),
        "usage": usage_object(job),
        "attempts": [attempt_object(attempt) for attempt in job.attempts],
    }


def _progress(job: JobStatus) -> dict[str, Any]:
    progress, left_s, silent_s = job.progress, eta_s(job), output_age_s(job.progress)
    return {
        "step": progress.step,
        "total": progress.total,
        "rate_per_s": progress.rate_per_s,
        "eta_s": None if left_s is None else round(left_s, 1),
        "source": None if progress.step is None else progress.source.value,
        "bar": progress.bar or None,
        "reported": timestamp(progress.reported_at),
        "last_output_s": None if silent_s is None else round(silent_s, 1),
        "metrics": dict(progress.metrics),
    }


def end_object(job: JobStatus) -> dict[str, Any]:
    """Describe how a job ended."""
    return {
        "state": job.state.value,
        "exit": {"code": job.exit_code, "signal": job.exit_signal},
        "verdict": _failure(job.failure) if job.failure else None,
    }


def _failure(failure: Outcome) -> dict[str, Any]:
    verdict = failure.verdict
    return {
        "rank": failure.rank,
        "node": failure.node or None,
        "code": failure.code,
        "signal": failure.signal or None,
        "message": failure.message or failure.reason,
        "class": verdict.cause if verdict else None,
        "means": verdict.means if verdict else None,
        "status": verdict.status.value if verdict else None,
    }


def attempt_object(attempt: AttemptSummary) -> dict[str, Any]:
    """Describe an attempt for JSON; null is unknown."""
    outcome = attempt.outcome
    timed = outcome if outcome and outcome.started_at else None
    told = ("job_id", "code", "cause", "reason", "step", "checkpoint", "next", "why", "rule")
    return {
        "attempt": attempt.number,
        **{name: getattr(outcome, name, None) for name in told},
        "nodes": attempt.nodes,
        "start": timestamp(timed.started_at) if timed else None,
        "end": timestamp(timed.ended_at) if timed else None,
        "elapsed_s": round(timed.ended_at - timed.started_at, 3) if timed else None,
        "lost_steps": attempt.lost_steps,
        "lost_s": None if attempt.lost_s is None else round(attempt.lost_s, 3),
        "exclude": outcome.exclude if outcome else (),
        "startup": startup_object(attempt.startup),
    }


def usage_object(job: JobStatus) -> list[dict[str, Any]]:
    """Describe what is used on each node for JSON; null is unknown."""
    data = []
    for node, sample in job.usage.items():
        told = {**vars(sample), "ranks": {str(rank): used for rank, used in sample.ranks}}
        told["gpus"] = [vars(gpu) for gpu in sample.gpus]
        told["alerts"] = [
            {"kind": each.kind.value, "gpu": each.gpu, "since": timestamp(each.at)}
            for each in sample.alerts
        ]
        del told["attempt"]
        age_s = round(max(0.0, time.time() - told.pop("at")), 1)
        data.append({"node": node, "sampled": timestamp(sample.at), "age_s": age_s, **told})
    return data


def startup_object(startup: Startup | None) -> dict[str, Any] | None:
    """Describe a start for JSON; null is unknown."""
    if startup is None:
        return None
    return {
        "is_restart": startup.is_restart,
        "not_forked": startup.not_forked or None,
        "total_s": round(startup.total_s, 3),
        "phases": [
            {"phase": phase.value, "seconds": round(taken, 3)} for phase, taken in startup.phases
        ],
    }


def outlook_object(job: JobStatus) -> dict[str, Any]:
    """Describe the facts and the changes for JSON; both are empty unless they were asked for."""
    outlook = job.outlook or Outlook()
    facts = [
        {
            **_described(fact),
            "text": fact_text(fact),
            "uses": {use.name.lower(): number for use, number in fact.uses},
            "start": timestamp(fact.start),
            "end": timestamp(fact.end),
        }
        for fact in outlook.facts
    ]
    sooner = [{"kind": x.kind, **_described(x), "command": command(x, job)} for x in outlook.sooner]
    return {"facts": facts, "sooner": sooner}


def _described(what: Fact | Sooner) -> dict[str, Any]:
    """Return the fields; an empty text is unknown, as is None."""
    return {name: None if value == "" else value for name, value in vars(what).items()}


def timestamp(epoch_s: float | None) -> str | None:
    """Write a time as RFC 3339 in UTC.

    >>> timestamp(0.25), timestamp(None)
    ('1970-01-01T00:00:00.250Z', None)
    """
    if epoch_s is None:
        return None
    then = datetime.fromtimestamp(epoch_s, timezone.utc)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")
