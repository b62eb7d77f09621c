"""The interface for training scripts: where they run, how to report progress, when to save.

Outside a run the functions do nothing. They never raise into the training.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.rank.emit import LossWatch, emit, number, rank
from clusterrun.rank.save_point import CallCounter
from clusterrun.rank.save_together import Checkpoints
from clusterrun.shared.checkpoint_files import Checkpoint

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Planned",
    "RunInfo",
    "checkpoint",
    "checkpoint_dir",
    "emit",
    "info",
    "planned",
    "rank",
    "should_checkpoint",
    "should_stop",
    "step",
]

STEP_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Where this process runs: run, attempt, job, node, rank and world size."""

    run_dir: Path
    attempt: int
    job_id: str
    node: str
    rank: int
    world_size: int


def info() -> RunInfo | None:
    """Return where this process runs; None outside a run."""
    env = os.environ
    try:
        return RunInfo(
            run_dir=Path(env["CLUSTERRUN_RUN_DIR"]),
            attempt=int(env["CLUSTERRUN_ATTEMPT"]),
            job_id=env["CLUSTERRUN_JOB_ID"],
            node=env["CLUSTERRUN_NODE"],
            rank=rank(),
            world_size=int(env["CLUSTERRUN_WORLD_SIZE"]),
        )
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """How `clusterrun submit --plan` wants this rank to train."""

    micro_batch: int
    accumulation: int
    gradient_checkpointing: bool


def planned() -> Planned | None:
    """Return how this rank should train; None unless it was submitted with --plan."""
    env = os.environ
    try:
        return Planned(
            micro_batch=int(env["CLUSTERRUN_MICRO_BATCH"]),
            accumulation=int(env["CLUSTERRUN_ACCUMULATION"]),
            gradient_checkpointing=env["CLUSTERRUN_GRAD_CKPT"] == "1",
        )
    except (KeyError, ValueError):
        return None


def checkpoint_dir() -> Path | None:
    """Return the checkpoint directory that all attempts of this run share; None outside a run."""
    path = os.environ.get("CLUSTERRUN_CHECKPOINT_DIR")
    return Path(path) if path else None


def step(step: int, total: int | None = None, **metrics: Any) -> None:
    """Report a completed step; rank 0 writes at most one event a second, and always the last."""
    if _reports():
        _steps.report(step, total, metrics)


def follow_trainer(step: int, total: int | None = None, **metrics: Any) -> None:
    """Report a step like `step`, for the callbacks that each trainer gets in a run."""
    if _reports():
        _steps.follow(step, total, metrics)


def alive() -> None:
    """Report progress within a step, such as an evaluation; at most one event a second."""
    if _reports():
        _steps.alive()


def _reports() -> bool:
    return "CLUSTERRUN_SPOOL" in os.environ and rank() == 0


def checkpoint(path: str | os.PathLike[str], step: int) -> None:
    """Report that a checkpoint is complete on disk; rank 0 writes the event."""
    if _reports():
        emit("checkpoint", path=os.path.abspath(os.fspath(path)), step=number(step))


def should_checkpoint() -> bool:
    """Return whether to save now; call it once a step, on every rank at the same place.

    Return True at the same call on all ranks if the time limit or a preemption is near, or if a
    person ended the job; from then on `should_stop` is also true. Read shared memory only: this
    needs no collective.
    """
    return _save_point().should_checkpoint()


def should_stop() -> bool:
    """Return whether to leave the training loop after this save and exit with status 0.

    It changes with `should_checkpoint`, and so at the same call on all ranks.
    """
    return _save_point().should_stop()


@functools.cache
def _save_point() -> CallCounter:
    if _reports():
        emit("asks")
    return CallCounter()


def report_end() -> None:
    """Report the losses of a rank that exits normally, if its script reported any."""
    if _steps.losses.count and _reports():
        emit("losses", **_steps.losses.summary())


class _Steps:
    """Writes one step a second, and keeps the newest for the exit.

    Steps from a trainer's callback (`follow`) are used until the script itself reports one.
    """

    def __init__(self) -> None:
        self._next = self._next_alive = 0.0
        self._has_own = False
        self.losses = LossWatch()
        self._held: tuple[Any, Any, dict[str, Any], float] | None = None

    def report(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        self._has_own = True
        self._pass_on(step, total, metrics)

    def follow(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        if self._has_own:
            self.alive()
        else:
            self._pass_on(step, total, metrics)

    def alive(self) -> None:
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + STEP_INTERVAL_S
            emit("alive")

    def _pass_on(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        self.losses.see(metrics)
        now = time.monotonic()
        if now < self._next and step != total:
            if self._held is None:
                atexit.register(self.flush)
            self._held = (step, total, metrics, time.time())
            return
        self._next = now + STEP_INTERVAL_S
        self._write(step, total, metrics, time.time())

    def flush(self) -> None:
        if self._held is not None:
            self._write(*self._held)

    def _write(self, step: Any, total: Any, metrics: dict[str, Any], at: float) -> None:
        atexit.unregister(self.flush)
        self._held = None
        self.losses.see_written(metrics)
        values = {name: number(value) for name, value in metrics.items()}
        emit("step", ts=round(at, 6), step=number(step), total=number(total), metrics=values)


_steps = _Steps()
