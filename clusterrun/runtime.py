"""What a training script may import: where it runs, and how to say how far it is.

Everything here is a no-op outside a run and never raises into the training.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.control import Action, ControlPage

STEP_INTERVAL_S = 1.0
DECISION_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Where this process is: run, attempt, job, node, rank and size of the world."""

    run_dir: Path
    attempt: int
    job_id: str
    node: str
    rank: int
    world_size: int


def info() -> RunInfo | None:
    """Say where this process runs; None outside a run."""
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


def checkpoint_dir() -> Path | None:
    """Name a directory of this run that later attempts find again; None outside a run."""
    path = os.environ.get("CLUSTERRUN_CHECKPOINT_DIR")
    return Path(path) if path else None


def step(step: int, total: int | None = None, **metrics: Any) -> None:
    """Say that a step is done; rank 0 writes at most one event a second, and the last one."""
    if "CLUSTERRUN_SPOOL" not in os.environ or rank() != 0:
        return
    _steps.report(step, total, metrics)


def checkpoint(path: str | os.PathLike[str], step: int) -> None:
    """Say that a checkpoint is complete on disk; rank 0 writes the event."""
    if "CLUSTERRUN_SPOOL" in os.environ and rank() == 0:
        emit("checkpoint", path=os.path.abspath(os.fspath(path)), step=_number(step))


def should_checkpoint() -> bool:
    """Say whether to save now; to be called once a step, on every rank at the same place.

    True at the same call on all ranks, when the time limit or a preemption is near, or when a
    person asked. Costs about a microsecond.
    """
    return _agreement().should_checkpoint()


def should_stop() -> bool:
    """Say whether to leave the training loop after this save, and to end with status 0.

    True from the call of `should_checkpoint` on that said so; the same on all ranks.
    """
    return _agreement().should_stop()


def rank() -> int:
    """Read the global rank from the environment; 0 where there is none."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def emit(kind: str, **fields: Any) -> None:
    """Append one event to the rank's file in the spool, where there is one."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    if not spool:
        return
    event = {"ts": round(time.time(), 6), "type": kind, "rank": rank(), **fields}
    path = os.path.join(spool, f"rank_{rank()}.events")
    try:
        line = json.dumps(event, default=str).encode() + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, TypeError):
        return  # a full or vanished disk must not end a training


class _Agreement:
    """The rank's side of the control page: count calls, and learn at which of them to save."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._rank, self._page = _control_page()
        self._calls = 0
        self._dealt_with = 0  # the newest request that needs no more waiting
        self._at = 0
        self._action = Action.NONE
        self._leaves = False

    def should_checkpoint(self) -> bool:
        if self._page is None or os.getpid() != self._pid:
            return False  # a process that the rank forked has no calls of its own
        self._calls += 1
        self._page.count(self._rank, self._calls)
        held = self._page.held
        if held > self._dealt_with:
            self._await_decision(self._page, held)
        if self._calls != self._at:
            return False
        self._leaves = self._leaves or self._action == Action.LEAVE
        return self._action != Action.NONE

    def should_stop(self) -> bool:
        if self._leaves and self._page is not None and os.getpid() == self._pid:
            self._page.stopping(self._rank)
        return self._leaves

    def _await_decision(self, page: ControlPage, held: int) -> None:
        """Wait until the agents say at which call to save; an agent may be dead or stopped."""
        self._dealt_with = held
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        while (decision := page.decision).request < held:
            if time.monotonic() > deadline:
                text = f"no decision on when to save came within {DECISION_TIMEOUT_S:.0f} s"
                print(f"clusterrun: {text}; training goes on", file=sys.stderr, flush=True)  # noqa: T201 - the rank's own stderr
                return
            time.sleep(0.001)
        if decision.at:
            self._at, self._action = decision.at, decision.action


@functools.cache
def _agreement() -> _Agreement:
    return _Agreement()


def _control_page() -> tuple[int, ControlPage | None]:
    """Map the page that the agent made; None outside a run, and where that can't be done."""
    spool, local_rank = os.environ.get("CLUSTERRUN_SPOOL"), os.environ.get("LOCAL_RANK", "")
    path = Path(spool or "", "control")
    try:
        if not spool or not local_rank.isdigit() or not path.is_file():
            return 0, None
        return int(local_rank), ControlPage(path, int(local_rank) + 1)
    except (OSError, ValueError):
        return 0, None  # a training goes on without being asked


class _Steps:
    """Let through one step a second, and keep the newest for the end."""

    def __init__(self) -> None:
        self._next = 0.0
        self._held: tuple[Any, Any, dict[str, Any]] | None = None

    def report(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        now = time.monotonic()
        if now < self._next and step != total:
            if self._held is None:
                atexit.register(self.flush)
            self._held = (step, total, metrics)
            return
        self._next = now + STEP_INTERVAL_S
        self._write(step, total, metrics)

    def flush(self) -> None:
        if self._held is not None:
            self._write(*self._held)

    def _write(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        atexit.unregister(self.flush)
        self._held = None
        values = {name: _number(value) for name, value in metrics.items()}
        emit("step", step=_number(step), total=_number(total), metrics=values)


def _number(value: Any) -> Any:
    """Turn a tensor or NumPy scalar into a number, anything else odd into text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - a value of the user's own class may raise anything
        return str(type(value).__name__)
    return number if number - number == 0 else str(number)  # JSON has no inf and no nan


_steps = _Steps()
