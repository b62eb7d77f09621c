"""How attempts ended, as their agents leave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterrun.outcome import Cause, Outcome


def outcome(root: Path, attempt: int = 1, **said: Any) -> Outcome:
    """Say how an attempt ended."""
    values: dict[str, Any] = {
        "attempt": attempt,
        "job_id": "4711",
        "started_at": 1000.0,
        "ended_at": 1140.0,
        "nodes": ("node17", "node18"),
        "code": 137,
        "cause": Cause.SIGNAL,
        "reason": "rank 1 on node18: killed by SIGKILL",
        "step": 140,
        "checkpoint": 100,
    }
    made = Outcome(**{**values, **said})
    (root / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    (root / "attempts" / str(attempt) / "outcome.json").write_text(made.to_json())
    return made
