"""How attempts ended, as their agents leave it, and the checkpoints that they left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Outcome
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import Checkpoint


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


def checkpoint(root: Path, step: int, *, world: int = 2, **settings: Any) -> Path:
    """Save a complete checkpoint."""
    path = root / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.pt").write_text(f"weights {step}")
    found = Checkpoint(path=path, step=step, world_size=world, settings=settings)
    checkpoint_files.mark(found)
    return path
