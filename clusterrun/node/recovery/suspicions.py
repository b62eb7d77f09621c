"""Record in `outcome.json` why an attempt that exited with status 0 may have trained nothing.

This reads a bounded part of the events and logs of a few nodes, once, so that `status` and `list`
need not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from clusterrun.diagnosis.kinds import Doubt, Suspicion
from clusterrun.diagnosis.training import Losses, PrintedTraining
from clusterrun.logformat.lines import RECORDS, parse_line
from clusterrun.rundir.events import Event, EventType, read_ends
from clusterrun.rundir.outcome import read_outcome, write_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import end_of, open_regular, size_of

FIRST_BYTES, LAST_BYTES = 128 * 1024, 512 * 1024  # of a node's log
LEAST_REPORTS: Final = 20  # of one loss: fewer may be chance
SAVED_BYTES: Final = 1 << 20  # a rank that wrote as much may have saved in its own way


class Success(NamedTuple):
    """What an attempt left that exited with status 0: events of rank 0's node, what it printed."""

    events: Sequence[Event]
    printed: PrintedTraining
    has_checkpoint: bool = False

    def of(self, kind: EventType) -> list[Event]:
        """Return the events of a type."""
        return [event for event in self.events if event.type is kind]

    @property
    def steps(self) -> list[Event]:
        """Return the reported steps."""
        return [event for event in self.of(EventType.STEP) if event.step is not None]

    @property
    def trainers(self) -> list[Event]:
        """Return where Trainers began: at a step, of a total if they announced one."""
        return [event for event in self.of(EventType.RESUMED) if event.is_trainer]

    @property
    def looked_for_checkpoint(self) -> bool:
        """Return whether the script itself looked for a checkpoint."""
        return len(self.of(EventType.RESUMED)) > len(self.trainers)


def examine(paths: RunPaths, attempt: int) -> None:
    """Record what is suspect about a successful attempt. Raises OSError and ValueError."""
    outcome = read_outcome(paths, attempt)
    if outcome is None or outcome.code or not outcome.nodes:  # no success, or no agent reported it
        return
    events = list(read_ends(paths.events(outcome.nodes[0]), attempt))
    has_resumed = any(event.type is EventType.RESUMED and event.step for event in events)
    has_checkpoint = outcome.checkpoint is not None or has_resumed
    success = Success(events, _printed(paths, attempt, outcome.nodes[0]), has_checkpoint)
    if found := suspicions_of(success):
        write_outcome(paths, dataclasses.replace(outcome, suspicions=found))


def suspicions_of(success: Success) -> tuple[Suspicion, ...]:
    """Return what is suspect; nothing about a script that reports nothing."""
    return tuple(Suspicion(kind=kind, text=text) for kind, text in _doubts(success))


def _doubts(success: Success) -> Iterator[tuple[Doubt, str]]:
    """Yield what is suspect; reported losses take precedence over those in the script's output."""
    if text := _no_step(success):
        yield Doubt.NO_STEP, f"no step was taken: {text}"
    elif text := _no_checkpoint(success):
        yield Doubt.NO_CHECKPOINT, f"no checkpoint was saved: {text}"
    printed = success.printed
    reported = [
        Losses(
            count=event.count or 0,
            last=event.last,
            is_constant=bool(event.is_constant),
            is_finite=bool(event.is_finite),
        )
        for event in success.of(EventType.LOSSES)[-1:]
    ]
    known = [losses for losses in (*reported, printed.losses) if losses.count]
    if known and not known[0].is_finite:
        yield Doubt.LOSS_NOT_FINITE, "the last loss is NaN or infinite"
        return
    losses = next((losses for losses in known if losses.count >= LEAST_REPORTS), Losses())
    is_usual = losses.last == 0 and printed.has_rewards  # 0 is usual with rewards, as in GRPO
    if losses.is_constant and not is_usual:
        text = f"it was {losses.last:.6g} in all {losses.count} reports"
        yield Doubt.LOSS_CONSTANT, f"the loss never changed: {text}"


def _no_step(success: Success) -> str:
    """Return how the attempt ended without a step; "" if it took one, or may have."""
    last = success.steps[-1] if success.steps else None
    if success.trainers:
        return _no_trainer_step(success.trainers, last)
    if last and last.step == 0 and (last.total or 0) > 1:
        has_metrics = any(event.metrics for event in success.steps)  # of a step that was taken
        return "" if has_metrics else f"the script reported step 0 of {last.total}, and none after"
    shows_training = last or success.of(EventType.ASKS) or success.printed.log.steps
    is_idle = not shows_training and not success.has_checkpoint
    if is_idle and success.looked_for_checkpoint:
        return "the script found no checkpoint, reported no step and saved nothing"
    return ""


def _no_trainer_step(trainers: Sequence[Event], last: Event | None) -> str:
    """Return where the first unfinished Trainer began and ended; "" if none, or if it stepped."""
    for begun in trainers:
        at = begun.step or 0
        was_complete = at > 0 and (begun.total is None or at >= begun.total)
        if not was_complete:
            # Step 0 proves nothing: a Trainer whose own loop steps reports it with each batch.
            has_not_moved = last is None or (at > 0 and last.step == at)
            of = "" if begun.total is None else f" of {begun.total}"
            return f"the training began at step {at}{of} and ended there" if has_not_moved else ""
    return ""


def _no_checkpoint(success: Success) -> str:
    """Return why a script that trained saved no checkpoint; "" if it did, or never meant to."""
    if success.has_checkpoint:
        return ""
    for unsaved in success.of(EventType.UNSAVED)[-1:]:
        return f"step {unsaved.step}: {unsaved.reason}"
    written = [e.written_bytes for e in success.events if e.written_bytes is not None]
    wrote_little = bool(written) and max(written) < SAVED_BYTES
    means_to_save = success.looked_for_checkpoint and not success.trainers  # Trainers save if asked
    has_trained = bool(success.steps and success.steps[-1].step)
    if means_to_save and has_trained and wrote_little:
        return "the script looked for one to resume from, and saved none"
    return ""


def _printed(paths: RunPaths, attempt: int, node: str) -> PrintedTraining:
    """Read what rank 0 printed at the start and at the end."""
    printed = PrintedTraining()
    for raw in _lines(paths.log(attempt, node)):
        line = parse_line(raw, node=node, offset=0, near_us=0)
        if line.rank == 0 and line.stream not in RECORDS:
            printed.feed(line.text.decode("utf-8", "replace").split("\r"))
    return printed


def _lines(log: Path) -> Iterator[bytes]:
    """Yield the first and the last lines of a log, without those that were cut."""
    if size_of(log) <= FIRST_BYTES + LAST_BYTES:
        yield from end_of(log, FIRST_BYTES + LAST_BYTES).split(b"\n")
        return
    with open_regular(log) as file:
        yield from file.read(FIRST_BYTES).split(b"\n")[:-1]
    yield from end_of(log, LAST_BYTES).split(b"\n")[1:]
