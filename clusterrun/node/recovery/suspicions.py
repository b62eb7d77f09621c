"""Record in `outcome.json` why an attempt that exited with status 0 may have trained nothing.

This reads a bounded part of the events and logs of a few nodes, once, so that `status` and `list`
need not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from clusterrun.diagnosis.suspicion import (
    Begun,
    Losses,
    PrintedTraining,
    SuccessFacts,
    alike,
    suspicions_of,
)
from clusterrun.logformat.lines import RECORDS, parse_line
from clusterrun.rundir.events import Event, EventType, read_ends
from clusterrun.rundir.outcome import Outcome, read_outcome, write_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan
from clusterrun.shared.files import end_of, open_regular, size_of

FEW: Final = 4  # nodes to read if the ranks joined no world
FIRST_BYTES, LAST_BYTES = 128 * 1024, 512 * 1024  # of a node's log


def examine(paths: RunPaths, attempt: int) -> None:
    """Record what is suspect about an attempt that exited with status 0.

    Raises OSError or ValueError if the run's files can't be read or written.
    """
    outcome = read_outcome(paths, attempt)
    if outcome is None or outcome.code or not outcome.nodes:
        return
    if found := suspicions_of(_facts(paths, outcome)):
        write_outcome(paths, dataclasses.replace(outcome, suspicions=found))


def _facts(paths: RunPaths, outcome: Outcome) -> SuccessFacts:
    head = list(read_ends(paths.events(outcome.nodes[0]), outcome.attempt))
    nodes = outcome.nodes[:1]
    if any(event.type is EventType.ALONE for event in head):
        nodes = outcome.nodes[:FEW]
    others = [
        event
        for node in nodes[1:]
        for event in read_ends(paths.events(node), outcome.attempt)
        if event.type is EventType.ALONE
    ]
    ranks = {event.rank for event in (*head, *others) if event.type is EventType.ALONE}
    alone = frozenset(rank for rank in ranks if rank is not None)
    printed = _printed(paths, outcome.attempt, nodes, alone | {0})
    main = printed[0]
    return dataclasses.replace(
        _reported(head),
        has_checkpoint=outcome.checkpoint is not None or _has_resumed(head),
        printed=main.losses,
        has_printed_steps=main.has_steps,
        has_rewards=main.has_rewards,
        alone=alone,
        alike=alike(printed) if alone else frozenset(),
        world_size=read_plan(paths).world_size if alone else 1,
    )


def _reported(events: Sequence[Event]) -> SuccessFacts:
    steps = [e for e in events if e.type is EventType.STEP and e.step is not None]
    resumed = [e for e in events if e.type is EventType.RESUMED]
    unsaved = next((e for e in reversed(events) if e.type is EventType.UNSAVED), None)
    losses = next((e for e in reversed(events) if e.type is EventType.LOSSES), None)
    written = [e.written_bytes for e in events if e.written_bytes is not None]
    return SuccessFacts(
        begun=tuple(Begun(step=e.step or 0, total=e.total) for e in resumed if e.is_trainer),
        steps=(steps[0].step or 0, steps[-1].step or 0) if steps else None,
        total=steps[-1].total if steps else None,
        has_metrics=any(e.metrics for e in steps),
        looked_for_checkpoint=not all(e.is_trainer for e in resumed),
        asked_to_save=any(e.type is EventType.ASKS for e in events),
        unsaved=f"step {unsaved.step}: {unsaved.reason}" if unsaved else "",
        written_bytes=max(written, default=None),
        reported=_losses(losses),
    )


def _losses(event: Event | None) -> Losses:
    if event is None:
        return Losses()
    return Losses(
        count=event.count or 0,
        last=event.last,
        is_constant=bool(event.is_constant),
        is_finite=bool(event.is_finite),
    )


def _has_resumed(events: Sequence[Event]) -> bool:
    return any(event.type is EventType.RESUMED and event.step for event in events)


def _printed(
    paths: RunPaths, attempt: int, nodes: Sequence[str], ranks: frozenset[int]
) -> dict[int, PrintedTraining]:
    """Read what ranks printed at the start and at the end."""
    found = {rank: PrintedTraining() for rank in ranks}
    for node in nodes:
        for raw in _lines(paths.log(attempt, node)):
            line = parse_line(raw, node=node, offset=0, near_us=0)
            if line.rank in found and line.stream not in RECORDS:
                found[line.rank].feed(line.text.decode("utf-8", "replace").split("\r"))
    return found


def _lines(log: Path) -> Iterator[bytes]:
    """Yield the first and the last lines of a log, without those that were cut."""
    if size_of(log) <= FIRST_BYTES + LAST_BYTES:
        yield from end_of(log, FIRST_BYTES + LAST_BYTES).split(b"\n")
        return
    with open_regular(log) as file:
        yield from file.read(FIRST_BYTES).split(b"\n")[:-1]
    yield from end_of(log, LAST_BYTES).split(b"\n")[1:]
