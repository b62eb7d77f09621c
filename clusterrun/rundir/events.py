"""The events of a run, `events/<node>.jsonl`: their types and fields, what a start took by them.

Each line is a JSON object with `ts` (epoch seconds), `type`, `attempt`, `node` and the fields
below. Ranks write the same lines, without attempt and node, for their agent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import open_regular, parse_object
from clusterrun.shared.typed import decoded

FIRST_BYTES = 256 * 1024  # started, rendezvous, world_ready: they may name thousands of nodes
LAST_BYTES = 64 * 1024  # the last steps and saves


class EventType(str, Enum):
    """The types of events that are read; others are written, too."""

    STARTED = "started"
    CHECKED = "checked"
    PREFLIGHT = "preflight"
    FORGE = "forge"
    RENDEZVOUS = "rendezvous"
    RANK_START = "rank_start"
    WORLD_READY = "world_ready"
    ENGINE = "engine"
    STEP = "step"
    RESUMED = "resumed"
    LOSSES = "losses"
    ASKS = "asks"
    CHECKPOINT = "checkpoint"
    UNSAVED = "unsaved"
    PEAKS = "peaks"
    INTERRUPTED = "interrupted"
    RANK_EXIT = "rank_exit"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event; a field that is missing or has another type is None."""

    at: float
    type: EventType
    attempt: int
    node: str
    rank: int | None = None
    step: int | None = None
    total: int | None = None
    path: str | None = None
    reason: str | None = None
    host: str | None = None
    engine: str | None = None
    world_size: int | None = None
    rss_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    written_bytes: int | None = None
    count: int | None = None
    code: int | None = None
    last: float | None = None
    waited_s: float | None = None
    job_start: float | None = None
    staged_at: float | None = None
    is_constant: bool | None = None
    is_finite: bool | None = None
    is_trainer: bool | None = None
    heard: bool | None = None
    metrics: Mapping[str, Any] | None = None
    note: Mapping[str, Any] | None = None
    findings: list[Any] | None = None


# The type of each field that may be None, by its annotation; a Mapping arrives as a dict.
_KINDS = {"int": int, "str": str, "float": float, "bool": bool, "list[Any]": list}
_TYPES: Mapping[str, type] = {
    name: _KINDS.get(text.removesuffix(" | None"), dict)
    for name, text in Event.__annotations__.items()
    if text.endswith(" | None")
}


def parse(line: bytes) -> Event | None:
    """Parse one event; None for other lines and for events of other types."""
    data = parse_object(line) or {}
    try:
        kind = EventType(data["type"])
        at, attempt = decoded(float, data["ts"]), decoded(int, data["attempt"])
    except (KeyError, ValueError):
        return None
    fields: dict[str, Any] = {n: v for n, v in data.items() if type(v) is _TYPES.get(n)}
    return Event(at=at, type=kind, attempt=attempt, node=str(data.get("node", "")), **fields)


def read(path: Path, types: Collection[EventType]) -> Iterator[Event]:
    """Yield the events of some types in file order; nothing if the file can't be read.

    Skip other lines without parsing: a month-long run reports millions of steps.
    """
    names = tuple(f'"{kind.value}"'.encode() for kind in types)
    with contextlib.suppress(OSError), open_regular(path) as lines:
        for line in lines:
            event = parse(line) if any(name in line for name in names) else None
            if event is not None and event.type in types:  # others have a field "step", too
                yield event


def read_ends(path: Path, attempt: int) -> Iterator[Event]:
    """Yield an attempt's first and last events; of early steps, only the one that ends a start."""
    first, has_step = b"", False
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start, _ = _offsets_around(file, size, attempt)
            _, end = _offsets_around(file, size, attempt + 1)
            file.seek(start)
            if end - start > FIRST_BYTES + LAST_BYTES:
                first = file.read(FIRST_BYTES).rpartition(b"\n")[0]
                file.seek(end - LAST_BYTES)
            last = file.read(end - file.tell()) + file.readline()  # `end` may be within a line
    except OSError:
        return
    for line in first.split(b"\n"):  # empty if the attempt is small: `last` has all
        is_step = b': "step"' in line
        if is_step and has_step:
            continue
        if (event := parse(line)) and event.attempt == attempt:
            has_step |= is_step
            yield event
    for line in last.split(b"\n"):
        if (event := parse(line)) and event.attempt == attempt:
            yield event


def _offsets_around(file: BinaryIO, size: int, attempt: int) -> tuple[int, int]:
    """Return two offsets between which an attempt begins, give or take a line, by bisection.

    A file contains the attempts in order. Stop when they are close, compared with LAST_BYTES.
    """
    low, high = 0, size
    while attempt > 1 and high - low > LAST_BYTES // 16:  # attempt 1 begins at 0
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # `middle` may be within a line
        found = parse_object(file.readline()) or {}
        if isinstance(found.get("attempt"), int) and found["attempt"] < attempt:
            low = middle
        else:
            high = middle
    return low, high


# Where the start of an attempt spent its time, by the events of its first node


class Phase(str, Enum):
    """The phases of a start, in order; each begins where the one before it ended."""

    STOP = "stop"  # of a failed attempt before: until its ranks have ended and it is recorded
    QUEUE = "queue"  # until the job starts
    PROLOG = "prolog"  # until the conductor takes the attempt
    DECISION = "decision"  # the same for a relaunch, which has no queue
    STAGE = "stage"  # until the nodes have a copy of the environment
    SETUP = "setup"  # until the first node's agent runs: srun, setup lines, its imports
    PREFLIGHT = "preflight"  # of the first node
    FORGE = "forge"  # until the first node's forge has imported what ranks need
    AGENTS = "agents"  # until all nodes have met
    LAUNCHER = "launcher"  # until all ranks of the first node have started
    IMPORTS = "imports"  # until rank 0 calls init_process_group()
    RENDEZVOUS = "rendezvous"  # until all ranks have joined
    FIRST_STEP = "first_step"  # until rank 0 reports a step


ENDED_BY: dict[EventType, Phase] = {  # the first node's events, in order; others are not seen there
    EventType.STARTED: Phase.SETUP,
    EventType.CHECKED: Phase.PREFLIGHT,
    EventType.FORGE: Phase.FORGE,
    EventType.RENDEZVOUS: Phase.AGENTS,
    EventType.RANK_START: Phase.LAUNCHER,
    EventType.WORLD_READY: Phase.RENDEZVOUS,
    EventType.STEP: Phase.FIRST_STEP,
}


@dataclass(frozen=True, kw_only=True)
class Startup:
    """The seconds of each phase of a start; those that are unknown are left out."""

    phases: tuple[tuple[Phase, float], ...]
    is_restart: bool = False  # it began when the previous attempt ended, not with a submission

    @property
    def total_s(self) -> float:
        """The time of all phases."""
        return sum(seconds for _, seconds in self.phases)


def startup_of(ends: Mapping[Phase, float], since: float | None, *, is_restart: bool) -> Startup:
    """Return how long each phase took; the first one begins at `since`, None if that is unknown."""
    phases, begin = [], since
    for phase in Phase:
        if (end := ends.get(phase)) is None:
            continue
        if begin is not None:
            phases.append((phase, max(0.0, end - begin)))  # machines' clocks differ a little
        begin = end if begin is None else max(begin, end)
    return Startup(phases=tuple(phases), is_restart=is_restart)


def read_start(paths: RunPaths, attempt: int) -> dict[Phase, float]:
    """Return when each phase of a start ended, by the first node's events; {} until ranks start."""
    record = read_attempt(paths, attempt)
    if not record.nodes:
        return {}
    ends: dict[Phase, float | None] = {Phase.PROLOG: record.taken_at or None}
    for event in read_ends(paths.events(record.nodes[0]), attempt):
        phase = ENDED_BY.get(event.type)
        if phase is Phase.LAUNCHER:  # the last rank ends it
            ends[phase] = max(ends.get(phase) or event.at, event.at)
        elif phase:  # the first event of this type ends it
            ends[phase] = ends.get(phase) or event.at
        if event.type is EventType.STARTED:
            ends |= {Phase.QUEUE: event.job_start, Phase.STAGE: event.staged_at}
        elif event.type is EventType.WORLD_READY and event.waited_s is not None:
            ends.setdefault(Phase.IMPORTS, event.at - event.waited_s)  # when rank 0 began to wait
        elif event.type is EventType.STEP:
            break
    if Phase.LAUNCHER not in ends:  # no rank has started
        return {}
    return {phase: end for phase, end in ends.items() if end is not None}
