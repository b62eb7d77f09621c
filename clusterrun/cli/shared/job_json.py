"""A job and its attempts as JSON."""

from __future__ import annotations

from typing import Any

from clusterrun.backends.attempts import AttemptSummary
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared.job_text import nodelist
from clusterrun.cli.shared.times import timestamp
from clusterrun.rundir.outcome import Outcome


def job_object(seen: JobStatus) -> dict[str, Any]:
    """Describe a job for JSON; null is what nobody could say."""
    record = seen.record
    return {
        "job_id": record.job_id or None,
        "name": record.name,
        "run_id": record.run_id,
        "run_dir": record.run_dir,
        "backend": record.cluster.value,
        "cluster": record.slurm_cluster,
        "state": seen.state.value,
        "reason": _reason(seen),
        "nodes": record.nodes,
        "nodelist": nodelist(seen) or None,
        "gpus": record.nodes * record.gpus_per_node,
        "world_size": record.world_size,
        "proven_world_size": seen.world_size,
        "attempt": seen.attempt,
        "submitted": timestamp(record.submitted_at),
        "expected_start": timestamp(seen.expected_start),
        "start": timestamp(seen.start),
        "end": timestamp(seen.end),
        "elapsed_s": seen.elapsed_s,
        "limit_s": seen.limit_s,
        "exit": {"code": seen.exit_code, "signal": seen.exit_signal},
        "progress": {
            "step": seen.progress.step,
            "total": seen.progress.total,
            "rate_per_s": seen.progress.rate_per_s,
            "reported": timestamp(seen.progress.reported_at),
        },
        "checkpoint": seen.checkpoint,
        "attempts": [attempt_object(attempt) for attempt in seen.attempts],
        "earlier_job_ids": list(record.earlier_job_ids),
        "chained_job_ids": list(record.chained_job_ids),
        "verdict": _verdict(seen.failure),
        "notes": list(seen.notes),
    }


def _reason(seen: JobStatus) -> dict[str, Any] | None:
    if seen.pending is not None:
        pending = seen.pending
        return {"code": pending.code, "text": pending.text, "can_start": pending.can_start}
    if seen.reason:
        return {"code": seen.reason, "text": seen.reason, "can_start": None}
    return None


def _verdict(failure: Outcome | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "rank": failure.rank,
        "node": failure.node or None,
        "code": failure.code,
        "signal": failure.signal or None,
        "message": failure.message or failure.reason,
    }


def attempt_object(attempt: AttemptSummary) -> dict[str, Any]:
    """Describe an attempt for JSON; null is what nobody could say."""
    outcome = attempt.outcome
    timed = outcome if outcome and outcome.started_at else None
    return {
        "attempt": attempt.number,
        "job_id": outcome.job_id if outcome else None,
        "nodes": list(attempt.nodes),
        "start": timestamp(timed.started_at) if timed else None,
        "end": timestamp(timed.ended_at) if timed else None,
        "elapsed_s": round(timed.ended_at - timed.started_at, 3) if timed else None,
        "code": outcome.code if outcome else None,
        "cause": outcome.cause.value if outcome else None,
        "reason": outcome.reason if outcome else None,
        "step": outcome.step if outcome else None,
        "checkpoint": outcome.checkpoint if outcome else None,
        "lost_steps": attempt.lost_steps,
        "lost_s": None if attempt.lost_s is None else round(attempt.lost_s, 3),
        "next": outcome.next.value if outcome else None,
        "why": outcome.why if outcome else None,
        "exclude": list(outcome.exclude) if outcome else [],
    }
