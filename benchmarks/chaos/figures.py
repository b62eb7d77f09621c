"""The cost of a fault, read from a run's events, log lines and Slurm's states."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import Value
from tests.chaos.training import Training
from tests.chaos.undergo import Undergone

NOTICED = ("failed", "interrupted")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The transition from one attempt to the next; times in epoch seconds, None if unknown."""

    hurt_at: float
    noticed_at: float | None
    left_at: float | None
    started_at: float | None
    trained_at: float | None
    lost_steps: int | None

    @classmethod
    def of(cls, training: Training, attempt: int, hurt_at: float) -> Interruption:
        """Read the transition from an attempt to the next."""
        before, after = training.printed(attempt), training.printed(attempt + 1)
        # A rank that its agent killed did not exit on its own.
        exits = training.events("rank_exit", "ended", attempt=attempt)
        return cls(
            hurt_at=hurt_at,
            noticed_at=noticed_at(training, attempt),
            left_at=max((float(event["ts"]) for event in exits), default=None),
            started_at=started_at(training, attempt + 1),
            trained_at=after[0].at if after else None,
            lost_steps=before[-1].step - after[0].step + 1 if before and after else None,
        )


def noticed_at(training: Training, attempt: int) -> float | None:
    """Return when the agents knew that the attempt was over or had to end."""
    events = training.events(*NOTICED, attempt=attempt)
    return float(events[0]["ts"]) if events else None


def started_at(training: Training, attempt: int) -> float | None:
    """Return when the first agent of an attempt reported its start."""
    events = training.events("started", attempt=attempt)
    return float(events[0]["ts"]) if events else None


def cold_start_s(training: Training) -> float:
    """Return how long the first attempt took from its agents' start to its first step."""
    began = started_at(training, 1)
    assert began is not None
    return training.printed(1)[0].at - began


def queued_at(undergone: Undergone) -> float | None:
    """Return when Slurm first showed the next job of the run, or the same one requeued."""
    first = undergone.jobs[0].job_id
    for seen in undergone.jobs:
        if seen.state == "PENDING" or seen.job_id != first:
            return seen.at
    return None


def row(undergone: Undergone) -> dict[str, Value]:
    """Return the table row of a training with one fault."""
    training = undergone.training
    seen: dict[str, Value] = {"ends": undergone.state, "attempts": training.newest_attempt}
    if training.newest_attempt == 1:
        noticed = noticed_at(training, 1)
        known = noticed is not None and noticed > undergone.hurt_at
        return {**seen, "noticed_s": _since(undergone.hurt_at, noticed if known else None)}
    cost = Interruption.of(training, 1, undergone.hurt_at)
    cold = cold_start_s(training)
    restart = _since(cost.noticed_at, cost.trained_at)
    return {
        **seen,
        "noticed_s": _since(cost.hurt_at, cost.noticed_at),
        "new_step_s": _since(cost.hurt_at, cost.trained_at),
        "restart_s": restart,
        "cold_start_s": cold,
        "ratio": restart / cold if restart is not None else None,
        "lost_steps": cost.lost_steps,
        "queued_s": _since(cost.left_at, queued_at(undergone)),
        "running_s": _since(queued_at(undergone), cost.started_at),
    }


def _since(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
