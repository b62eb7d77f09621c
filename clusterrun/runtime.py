"""The interface for training scripts: where they run, how to report progress, when to save.

Outside a run, the functions do nothing. An error in them never stops the training.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.rank.emit import LossWatch, emit, number, rank, say
from clusterrun.rank.save_together import Checkpoints
from clusterrun.shared.checkpoint_files import Checkpoint
from clusterrun.shared.control_page import ControlPage

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
DECISION_TIMEOUT_S = 60.0


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
    """Report a completed step; rank 0 writes at most one event per second, and always the last."""
    if _is_reporter():
        _steps.report(step, total, metrics, is_own=True)


def follow_trainer(step: int, total: int | None = None, **metrics: Any) -> None:
    """Report a step like `step`, for the callbacks that each trainer gets in a run."""
    if _is_reporter():
        _steps.report(step, total, metrics, is_own=False)


def alive() -> None:
    """Report progress within a step, such as an evaluation; at most one event a second."""
    if _is_reporter():
        _steps.alive()


def _is_reporter() -> bool:
    return "CLUSTERRUN_SPOOL" in os.environ and rank() == 0


def checkpoint(path: str | os.PathLike[str], step: int) -> None:
    """Report that a checkpoint is complete on disk; rank 0 writes the event."""
    if _is_reporter():
        emit("checkpoint", path=os.path.abspath(os.fspath(path)), step=number(step))


def should_checkpoint() -> bool:
    """Return whether to save now; call it once per step, at the same place on every rank.

    Return True at the same call on all ranks if the time limit or a preemption is near, or if a
    user asks the job to end. After that, `should_stop` also returns True. This reads only shared
    memory and is not a collective.
    """
    return _save_point().should_checkpoint()


def should_stop() -> bool:
    """Return whether to leave the training loop after this save and exit with status 0.

    It becomes true with `should_checkpoint`, and therefore at the same call on all ranks.
    """
    return _save_point().should_stop()


class _CallCounter:
    """Counts the calls of this rank up to the one at which all ranks save and stop."""

    def __init__(self) -> None:
        if _is_reporter():
            emit("asks")  # the script asks when to save
        self._pid = os.getpid()
        # A launcher of a single process sets no LOCAL_RANK.
        text = os.environ.get("LOCAL_RANK", "0")
        self._local_rank = int(text) if text.isdigit() else 0
        self._page = control_page(self._local_rank) if text.isdigit() else None
        self._calls = 0
        self._dealt_with = 0  # the newest request that this rank has waited for
        self._save_at = 0
        self._is_reached = False

    def should_checkpoint(self) -> bool:
        """Count this call, and return whether it is the one to save at."""
        if self._page is None or os.getpid() != self._pid:
            return False  # a forked process is not counted
        self._calls += 1
        if self._calls == 1:
            self._leave_sigterm_to_agent(self._page)
        self._page.count(self._local_rank, self._calls)
        request = self._page.newest_request
        if request > self._dealt_with:
            self._dealt_with = request
            self._save_at = self._await_save_point(self._page, request) or self._save_at
        if self._calls != self._save_at:
            return False
        self._is_reached = True
        return True

    def should_stop(self) -> bool:
        """Return whether the save point was reached; if so, tell the agent that the rank stops."""
        if self._is_reached and self._page is not None and os.getpid() == self._pid:
            self._page.stopping(self._local_rank)
        return self._is_reached

    def _leave_sigterm_to_agent(self, page: ControlPage) -> None:
        """Ignore SIGTERM from now on: the agent also gets it, and has all ranks save and stop.

        Slurm may signal every process of a step. A handler of the script stays, and child
        processes regain the default action.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _nothing)
            signal.siginterrupt(signal.SIGTERM, False)  # no EINTR in the script's C libraries
            os.register_at_fork(after_in_child=_restore_sigterm)
            page.set_does_not_save_on(self._local_rank)  # SIGTERM: the agent acts

    def _await_save_point(self, page: ControlPage, request: int) -> int:
        """Return the call that the agents choose; 0 for none, or after a limit: one may be dead."""
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        while (decided := page.save_point).request < request:
            if time.monotonic() > deadline:
                waited = f"no save point was chosen within {DECISION_TIMEOUT_S:.0f} s"
                say(f"{waited}; training continues")
                return 0
            time.sleep(0.001)
        return decided.at


_save_point = functools.cache(_CallCounter)


def _nothing(*_: object) -> None:
    """Handle a signal by doing nothing."""


def _restore_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def control_page(local_rank: int) -> ControlPage | None:
    """Map the page that the agent made; None outside a run, or if it can't be mapped."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    path = Path(spool or "", "control")
    try:
        return ControlPage(path, local_rank + 1) if spool and path.is_file() else None
    except (OSError, ValueError):
        return None  # the training continues and is never asked to save


def report_end() -> None:
    """Report the losses of a rank that exits normally, if its script reported any."""
    if _steps.losses.count and _is_reporter():
        emit("losses", **_steps.losses.summary())


class _Steps:
    """Writes a step a second, and the last; those of a trainer until the script reports its own."""

    def __init__(self) -> None:
        self._next_at = self._next_alive_at = 0.0
        self._has_own = False
        self.losses = LossWatch()
        self._held: tuple[Any, Any, dict[str, Any], float] | None = None  # written at exit

    def alive(self) -> None:
        now = time.monotonic()
        if now >= self._next_alive_at:
            self._next_alive_at = now + STEP_INTERVAL_S
            emit("alive")

    def report(self, step: Any, total: Any, metrics: dict[str, Any], *, is_own: bool) -> None:
        """Write the step if the last one is a second old or it is the final one, else hold it."""
        self._has_own |= is_own
        if self._has_own and not is_own:
            self.alive()  # a trainer's step only shows progress beside the script's own
            return
        self.losses.see(metrics)
        now = time.monotonic()
        if now < self._next_at and step != total:
            if self._held is None:
                atexit.register(self.flush)
            self._held = (step, total, metrics, time.time())
            return
        self._next_at = now + STEP_INTERVAL_S
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
