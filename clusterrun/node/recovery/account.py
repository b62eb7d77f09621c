"""Record an attempt for the rule book."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from clusterrun.node.base.causes import Ending, NodeError, NodeExit
from clusterrun.node.recovery.rules import LOSSES
from clusterrun.rundir.attempt import amend_attempt, read_attempt
from clusterrun.rundir.outcome import Cause, Next, Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths


class Account:
    """Record how far the training got; rank 0 reports it."""

    def __init__(self, paths: RunPaths, number: int, job_id: str) -> None:
        self._paths, self._number, self._job_id = paths, number, job_id
        self._started_at = time.time()
        self._step: int | None = None
        self._total = 0
        self.checkpoint: int | None = None
        self.is_through = False
        self.unfit: tuple[str, ...] = ()

    def open(self) -> None:
        """Read what was saved before."""
        before: list[Outcome] = []
        if self._number > 1:
            from clusterrun.node.recovery.conclude import past  # not in a run's first attempt

            before = past(self._paths, self._number)
        if before:
            self._mend(before[-1])
        self.checkpoint = max(
            (o.checkpoint for o in before if o.checkpoint is not None), default=None
        )
        vanished = [outcome for outcome in before[-LOSSES:] if outcome.cause is Cause.VANISHED]
        if len(vanished) == LOSSES:
            text = f"{LOSSES} attempts in a row left no report: each lost its batch host"
            raise NodeError(NodeExit.NODE_LOST, text)

    def _mend(self, last: Outcome) -> None:
        """Correct what followed an attempt that Slurm ended only to requeue the job."""
        is_same_job = last.job_id == self._job_id
        was_cancelled = last.cause is Cause.CANCELLED and last.next is Next.STOP
        is_requeued = is_same_job and (was_cancelled or last.next is Next.SUCCESSOR)
        is_undecided = last.code != 0 and not last.why
        if is_undecided or is_requeued:
            why = last.why if last.next is Next.SUCCESSOR else "Slurm started the job again"
            with contextlib.suppress(OSError):
                mended = dataclasses.replace(last, next=Next.REQUEUE, why=why)
                write_outcome(self._paths, mended)

    def take(self, event: Mapping[str, Any]) -> None:
        """Record a step, a checkpoint, or the step from which the attempt resumed."""
        step = event.get("step")
        if not isinstance(step, int):
            return
        if event.get("type") == "step":
            self._step = step
            # A trainer that is stopped early reports its last step as the total.
            self._total = max(self._total, event.get("total") or 0)
            self.is_through = step == self._total
        elif event.get("type") == "checkpoint":
            if self._step is not None:  # steps are reported once a second
                self._step = max(step, self._step)
            self.checkpoint = max(step, self.checkpoint or 0)
        elif event.get("type") == "resumed":
            with contextlib.suppress(OSError):
                if read_attempt(self._paths, self._number).resumed is None:  # the first one counts
                    amend_attempt(self._paths, self._number, resumed=step)

    def close(self, ending: Ending, nodes: tuple[str, ...]) -> None:
        """Write the outcome; a full disk must not stop the run."""
        outcome = outcome_of(ending, self._number, self._job_id, nodes, self._started_at)
        with contextlib.suppress(OSError):
            write_outcome(
                self._paths,
                dataclasses.replace(
                    outcome, step=self._step, checkpoint=self.checkpoint, unfit=self.unfit
                ),
            )


def outcome_of(
    ending: Ending, number: int, job_id: str, nodes: tuple[str, ...], started_at: float
) -> Outcome:
    """Return the outcome of an attempt, without how far it got."""
    failure = ending.failure
    return Outcome(
        attempt=number,
        job_id=job_id,
        started_at=started_at,
        ended_at=time.time(),
        nodes=nodes,
        code=ending.code,
        cause=ending.cause,
        reason=ending.reason,
        interruption=ending.interruption,
        is_handled=ending.is_handled,
        failed_at=failure.at if failure else None,
        node=failure.node if failure else None,
        rank=failure.rank if failure else None,
        where=(failure.where or None) if failure else None,
        signal=failure.signal if failure else 0,
        message=failure.message if failure else "",
        alike=ending.alike,
    )
