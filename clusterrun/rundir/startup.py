"""Where the start of an attempt spent its time, by the events of its first node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.events import EventType, read_ends
from clusterrun.rundir.paths import RunPaths

STAGED_AT: Final = "CLUSTERRUN_STAGED_AT"  # epoch seconds, in the environment of agents


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

    @property
    def text(self) -> str:
        """The phase for people."""
        return self.value.replace("_", " ")


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
    """The seconds of each phase of a start; those that are unknown are left out.

    `is_restart`: it began when the previous attempt failed or ended, not with a submission.
    `not_forked`: why the first node's ranks were not forked; empty if they were, or need not be.
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


def read_start(paths: RunPaths, attempt: int) -> tuple[dict[Phase, float], str]:
    """Return when each phase of an attempt's start ended, and why no rank was forked.

    Both are empty until ranks have started. The times are those of the first node's events.
    """
    record = read_attempt(paths, attempt)
    ends: dict[Phase, float | None] = {Phase.PROLOG: record.taken_at or None}
    not_forked = ""
    for head in record.nodes[:1]:
        for event in read_ends(paths.events(head), attempt):
            if phase := ENDED_BY.get(event.type):
                known = ends.get(phase) or event.at  # ranks' events are in no order
                ends[phase] = max(known, event.at) if phase is Phase.LAUNCHER else known
            if event.type is EventType.STARTED:
                ends |= {Phase.QUEUE: event.job_start, Phase.STAGE: event.staged_at}
            elif event.type is EventType.NOT_FORKED:
                not_forked = event.reason or ""
            elif event.type is EventType.WORLD_READY and event.waited_s is not None:
                ends.setdefault(Phase.IMPORTS, event.at - event.waited_s)
            elif event.type is EventType.STEP:
                break
    if Phase.LAUNCHER not in ends:
        return {}, ""
    return {phase: end for phase, end in ends.items() if end is not None}, not_forked
