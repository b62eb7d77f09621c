"""What must hold when a training that was hurt is over; each check says what is wrong, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterrun.rundir.end import Cause
from tests.chaos.faults import Fault
from tests.chaos.training import Printed, Training


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What an undisturbed training of the same seed ends with."""

    final: dict[str, bytes]
    losses: dict[int, str]

    @classmethod
    def of(cls, training: Training) -> Reference:
        losses = {line.step: line.loss for line in training.printed()}
        return cls(final=training.final_bytes(), losses=losses)


def problems(
    training: Training,
    reference: Reference,
    fault: Fault,
    state: str,
    unusable: Mapping[int, int] | None = None,
) -> list[str]:
    """List what is wrong with a training that is over, in this state, after a fault.

    `unusable` counts by attempt how many of the newest checkpoints it could not use; without it
    the fault says so of the second.
    """
    if unfinished := list(half_written(training.root)):
        return unfinished
    found = []
    if state != fault.state:
        found.append(f"the run is {state}, not {fault.state}")
    if fault.attempts not in (None, training.newest_attempt):
        found.append(f"it took {training.newest_attempt} attempts, not {fault.attempts}")
    if fault.trace and not has_trace(training, fault.trace):
        found.append(f"the fault had no effect: nothing says {fault.trace}")
    if fault.same_agents not in (None, agents(training, 1) == agents(training, 2)):
        found.append(
            f"the agents of both attempts are {agents(training, 1)}, {agents(training, 2)}"
        )
    found += other_losses(training, reference)
    if fault.state == "COMPLETED":
        found += other_ending(training, reference)
    if fault.warned:
        return [*found, *lost_steps(training)]
    return [*found, *repeated_too_much(training, unusable or {2: fault.unusable})]


def has_trace(training: Training, text: str) -> bool:
    """Say whether a text is in what the ranks wrote or in the events."""
    files = [*training.root.glob("logs/a*/*.log"), *training.root.glob("events/*.jsonl")]
    return any(text in path.read_text(errors="replace") for path in files)


def agents(training: Training, attempt: int) -> set[tuple[str, int]]:
    """Name the agents of an attempt by node and pid."""
    started = training.events("started", attempt=attempt)
    return {(str(event["node"]), int(event["pid"])) for event in started}


def have_met(one: Training, other: Training) -> bool:
    """Say whether two trainings ran at the same time."""
    (start, end), (other_start, other_end) = map(_span, (one, other))
    return start < other_end and other_start < end


def _span(training: Training) -> tuple[float, float]:
    times = [float(event["ts"]) for event in training.events("rank_start", "rank_exit")]
    return min(times), max(times)


def other_losses(training: Training, reference: Reference) -> Iterator[str]:
    """Compare each step that was taken, and those that were taken twice, with the undisturbed."""
    for line in training.printed():
        if line.loss != reference.losses[line.step]:
            yield f"{line} has not the loss {reference.losses[line.step]}"


def other_ending(training: Training, reference: Reference) -> Iterator[str]:
    """Compare weights, optimizer and random numbers bit for bit; miss no step."""
    final = training.final_bytes()
    if final.keys() != reference.final.keys():
        yield f"the last checkpoint holds {sorted(final)}, not {sorted(reference.final)}"
    for name in sorted(final.keys() & reference.final.keys()):
        if final[name] != reference.final[name]:
            yield f"{name} of the last checkpoint is not that of the undisturbed training"
    if missing := reference.losses.keys() - trained(training):
        yield f"never trained: steps {sorted(missing)}"


def trained(training: Training) -> set[int]:
    """List the steps that were printed, or are in a checkpoint of a node that died meanwhile.

    What the ranks of such a node printed in its last moment is lost with it.
    """
    steps = {line.step for line in training.printed()}
    for attempt in range(1, training.newest_attempt + 1):
        cause, lines = (training.outcome(attempt) or {}).get("cause"), training.printed(attempt)
        if lines and cause == Cause.NODE_LOST.value:
            steps |= set(range(lines[-1].step, max(training.saved(attempt), default=0) + 1))
    return steps


def lost_steps(training: Training) -> Iterator[str]:
    """Hold each attempt to go on with the very next step: there was time to save."""
    done, attempts = 0, training.newest_attempt
    for attempt in range(1, attempts + 1):
        if lines := training.printed(attempt):
            yield from _not_in_a_row(lines, done)
            done = lines[-1].step
    saved = max((step for n in range(1, attempts + 1) for step in training.saved(n)), default=0)
    if saved != done:
        yield f"the last step is {done}, the last checkpoint {saved}"


def repeated_too_much(training: Training, unusable: Mapping[int, int]) -> Iterator[str]:
    """Hold the first step of each attempt to the newest checkpoint that it could find."""
    saved: list[int] = []
    for attempt in range(1, training.newest_attempt + 1):
        lines = training.printed(attempt)
        if lines:
            usable = [0, *saved]
            yield from _not_in_a_row(lines, usable[-1 - min(unusable.get(attempt, 0), len(saved))])
        saved = sorted({*saved, *training.saved(attempt)})


def _not_in_a_row(lines: list[Printed], before: int) -> Iterator[str]:
    steps = [line.step for line in lines]
    if steps[0] != before + 1:
        yield f"attempt {lines[0].attempt} began with step {steps[0]}, not with {before + 1}"
    if steps != list(range(steps[0], steps[0] + len(steps))):
        yield f"attempt {lines[0].attempt} printed the steps {steps}"


def half_written(root: Path) -> Iterator[str]:
    """Find files that nobody finished, and records that can't be read."""
    for path in root.rglob("*"):
        if path.suffix == ".tmp":
            yield f"left behind: {path.relative_to(root)}"
        if path.suffix == ".json" and not _parses(path.read_text()):
            yield f"can't be read: {path.relative_to(root)}"
        if path.suffix == ".jsonl" and not all(map(_parses, path.read_text().split("\n")[:-1])):
            yield f"has a line that can't be read: {path.relative_to(root)}"


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
