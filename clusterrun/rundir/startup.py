"""Where the start of an attempt spent its time: `attempts/<n>/start.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from clusterrun.rundir import reading
from clusterrun.rundir.events import EventType
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole

SCHEMA = "clusterrun.start/1"
STAGED_AT = "CLUSTERRUN_STAGED_AT"  # epoch seconds, in the environment of agents


class Phase(str, Enum):
    """The phases of a start, in order; each begins where the one before it ended."""

    STOP = "stop"  # of a failed attempt before: until its ranks have ended and it is recorded
    QUEUE = "queue"  # until the job starts
    PROLOG = "prolog"  # until the conductor takes the attempt
    DECISION = "decision"  # the same for a relaunch, which has no queue
    STAGE = "stage"  # until the nodes have a copy of the environment
    SETUP = "setup"  # until the head's agent runs: srun, setup lines, its imports
    PREFLIGHT = "preflight"  # of the head's node
    FORGE = "forge"  # until the head's forge has imported what ranks need
    AGENTS = "agents"  # until all nodes have met
    LAUNCHER = "launcher"  # until all ranks of the head's node have started
    IMPORTS = "imports"  # until rank 0 calls init_process_group()
    RENDEZVOUS = "rendezvous"  # until all ranks have joined
    FIRST_STEP = "first_step"  # until rank 0 reports a step

    @property
    def text(self) -> str:
        """The phase for people."""
        return self.value.replace("_", " ")


ENDED_BY: dict[EventType, Phase] = {  # the head's events, in order; others are not seen there
    EventType.STARTED: Phase.SETUP,
    EventType.FORGE: Phase.FORGE,
    EventType.RENDEZVOUS: Phase.AGENTS,
    EventType.RANK_START: Phase.LAUNCHER,
    EventType.WORLD_READY: Phase.RENDEZVOUS,
    EventType.STEP: Phase.FIRST_STEP,
}


@dataclass(frozen=True, kw_only=True)
class Startup:
    """The seconds of each phase of a start; those that are unknown are left out.

    `is_restart`: it began when the previous attempt failed or ended, not with a submission.
    `not_forked`: why the head's ranks were not forked; empty if they were, or need not be.
    """

    phases: tuple[tuple[Phase, float], ...]
    is_restart: bool = False
    not_forked: str = ""

    @property
    def total_s(self) -> float:
        """The time of all phases."""
        return sum(seconds for _, seconds in self.phases)


def startup_of(
    ends: Mapping[Phase, float],
    since: float | None,
    *,
    is_restart: bool = False,
    not_forked: str = "",
) -> Startup:
    """Return the phases between their ends; without `since`, the first one's time is unknown.

    Clocks of different machines may differ a little: no phase takes less than 0 s.
    """
    found, at = [], since
    for phase in Phase:
        if (end := ends.get(phase)) is None:
            continue
        if at is not None:
            found.append((phase, max(0.0, end - at)))
        at = end if at is None else max(at, end)
    return Startup(phases=tuple(found), is_restart=is_restart, not_forked=not_forked)


@dataclass(frozen=True, kw_only=True)
class _Told:
    ends: Mapping[str, float] = field(default_factory=dict)
    not_forked: str = ""


def write_start(
    paths: RunPaths, attempt: int, ends: Mapping[Phase, float], not_forked: str = ""
) -> None:
    """Record when each phase ended (epoch s), and why no rank was forked. Raises OSError."""
    times = {phase.value: round(ends[phase], 3) for phase in Phase if phase in ends}
    told = {"schema": SCHEMA, "ends": times, "not_forked": not_forked}
    write_whole(paths.start(attempt), json.dumps(told) + "\n")


def read_start(paths: RunPaths, attempt: int) -> tuple[dict[Phase, float], str]:
    """Return when each phase of an attempt's start ended, and why no rank was forked.

    Both are empty until its ranks have started.
    """
    told = reading.read(paths.start(attempt), _Told, SCHEMA) or _Told()
    return {phase: told.ends[phase.value] for phase in Phase if phase.value in told.ends}, (
        told.not_forked
    )
