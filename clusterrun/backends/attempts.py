"""The attempts of a run: how each ended, and how much of its work had to be repeated."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.errors import NodeExit
from clusterrun.rundir.outcome import Cause, Outcome, Reason, read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.startup import Startup
from clusterrun.rundir.world import read_world
from clusterrun.shared import files

HALTS = 2  # that make a node bad; one may be chance


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """One attempt; `outcome` is None while it runs, and if no node could write it.

    A later attempt repeated `lost_steps`, which had taken an estimated `lost_s`. `startups`
    sets `startup`.
    """

    number: int
    nodes: tuple[str, ...]
    outcome: Outcome | None
    lost_steps: int | None = None
    lost_s: float | None = None
    startup: Startup | None = None


def read_attempts(paths: RunPaths, newest: int | None = None) -> tuple[AttemptSummary, ...]:
    """Read all attempts of a run, in order, up to the `newest` if it is known."""
    numbers = [number for number in paths.attempts() if newest is None or number <= newest]
    outcomes = {number: read_outcome(paths, number) for number in numbers}
    return tuple(_attempt(paths, number, outcomes) for number in numbers)


def cancelled_outcome(attempt: AttemptSummary, job_id: str) -> Outcome:
    """Return the outcome of an attempt that was cancelled before any node could write it."""
    return Outcome(
        attempt=attempt.number,
        job_id=job_id,
        started_at=0.0,
        ended_at=0.0,
        nodes=attempt.nodes,
        code=int(NodeExit.CANCELLED),
        cause=Cause.CANCELLED,
        reason=Reason.END.text,
    )


def bad_nodes(paths: RunPaths) -> tuple[str, ...]:
    """Return the nodes that did not answer, and those on which ranks halted several times."""
    outcomes = [attempt.outcome for attempt in read_attempts(paths) if attempt.outcome]
    silent = [node for outcome in outcomes for node in outcome.exclude]
    halts = [outcome.node for outcome in outcomes if outcome.cause is Cause.HALTED]
    halting = [node for node in halts if node and halts.count(node) >= HALTS]
    return tuple(dict.fromkeys((*silent, *halting)))


def _attempt(paths: RunPaths, number: int, outcomes: dict[int, Outcome | None]) -> AttemptSummary:
    outcome = outcomes[number]
    nodes = outcome.nodes if outcome else read_world(paths, number)
    if outcome is None or outcome.step is None or outcome.cause is Cause.COMPLETED:
        return AttemptSummary(number=number, nodes=nodes, outcome=outcome)
    if outcome.checkpoint is None and number + 1 not in outcomes:
        # The script may have saved without reporting it: only the next attempt shows that.
        return AttemptSummary(number=number, nodes=nodes, outcome=outcome)
    first = _resumed_from(paths, number, outcomes)
    lost = max(0, outcome.step - _resumed_from(paths, number + 1, outcomes))
    done = outcome.step - first
    lost_s = (outcome.ended_at - outcome.started_at) * min(1.0, lost / done) if done > 0 else None
    return AttemptSummary(
        number=number, nodes=nodes, outcome=outcome, lost_steps=lost, lost_s=lost_s
    )


def _resumed_from(paths: RunPaths, number: int, outcomes: dict[int, Outcome | None]) -> int:
    """Return the step that an attempt resumed from, else the newest that it could resume from."""
    try:
        return int(files.read_whole(paths.resumed(number))[:15])
    except (OSError, ValueError):
        before = outcomes.get(number - 1)
        return (before.checkpoint if before else None) or 0
