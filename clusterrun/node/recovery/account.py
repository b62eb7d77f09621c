"""Record an attempt for the rule book."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from clusterrun.node.base.causes import Ending, NodeError, NodeExit
from clusterrun.node.base.identity import Attempt
from clusterrun.node.recovery.rules import LOSSES
from clusterrun.rundir.outcome import Cause, Next, Outcome, write_outcome
from clusterrun.shared import files


class Account:
    """Record how far the training got; rank 0, on the head's node, reports it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._started_at = time.time()
        self._step: int | None = None
        self._total = 0
        self.checkpoint: int | None = None
        self.is_through = False
        self.unfit: tuple[str, ...] = ()

    def open(self) -> None:
        """Read what was saved before."""
        before: list[Outcome] = []
        if self._attempt.number > 1:
            from clusterrun.node.recovery.conclude import past  # not in a run's first attempt

            before = past(self._attempt.paths, self._attempt.number)
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
        is_same_job = last.job_id == self._attempt.who.job_id
        was_cancelled = last.cause is Cause.CANCELLED and last.next is Next.STOP
        is_requeued = is_same_job and (was_cancelled or last.next is Next.SUCCESSOR)
        is_undecided = last.code != 0 and not last.why
        if is_undecided or is_requeued:
            why = last.why if last.next is Next.SUCCESSOR else "Slurm started the job again"
            with contextlib.suppress(OSError):
                mended = dataclasses.replace(last, next=Next.REQUEUE, why=why)
                write_outcome(self._attempt.paths, mended)

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
            with contextlib.suppress(OSError):  # the first one counts
                files.create(self._attempt.paths.resumed(self._attempt.number), f"{step}\n")

    def close(self, ending: Ending) -> None:
        """Write exit status and outcome, as the head or as the first node that lost the head.

        srun's own exit status is that of the task that it killed last.
        """
        paths, number, who = self._attempt.paths, self._attempt.number, self._attempt.who
        failure, code = ending.failure, ending.code
        with contextlib.suppress(OSError):
            files.create(paths.status(number), f"{code}\n")
        if who.is_head:
            with contextlib.suppress(OSError, ValueError):  # another node may be writing it
                code = int(paths.status(number).read_text(encoding="ascii"))
        outcome = Outcome(
            attempt=number,
            job_id=who.job_id,
            started_at=self._started_at,
            ended_at=time.time(),
            nodes=who.nodes,
            code=code,
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
            step=self._step,
            checkpoint=self.checkpoint,
            unfit=self.unfit,
        )
        with contextlib.suppress(OSError):  # FileExistsError: the head or another was first
            if who.is_head:
                write_outcome(paths, outcome)
            else:
                files.create(paths.outcome(number), outcome.to_json())
