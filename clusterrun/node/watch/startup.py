"""Record, as the head, when each phase of an attempt's start ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.shared_disk import SharedDisk
from clusterrun.rundir.claims import taken_at
from clusterrun.rundir.startup import ENDED_BY, STAGED_AT, Phase, write_start

_EVENTS = {kind.value: phase for kind, phase in ENDED_BY.items()}
# Slurm 22.05 does not set the first one.
_VARIABLES = {Phase.QUEUE: "SLURM_JOB_START_TIME", Phase.STAGE: STAGED_AT}


class StartWatch:
    """Learns the times from this node's events.

    It writes them when the ranks of this node have started, when all ranks have joined, and after
    the first step.
    """

    def __init__(self, attempt: Attempt, disk: SharedDisk) -> None:
        self._attempt, self._disk = attempt, disk
        self._starts: list[float] = []  # of this node's ranks
        self._ends: dict[Phase, float] = {}
        self.not_forked = ""  # why the ranks of this node were not forked

    def reached(self, phase: Phase, at: float) -> None:
        """Record the end of a phase."""
        if phase not in self._ends:
            self._ends[phase] = at
            if phase in (Phase.LAUNCHER, Phase.RENDEZVOUS, Phase.FIRST_STEP):
                self._disk.do(partial(self._write, dict(self._ends)))

    def see(self, event: Mapping[str, Any]) -> None:
        """Take an event; its time is in the head's clock."""
        kind, at = event["type"], float(event["ts"])
        if kind == "rank_start":
            self._starts.append(at)
            if len(self._starts) == self._attempt.plan.procs_per_node:
                self.reached(Phase.LAUNCHER, max(self._starts))
        elif kind == "world_ready":
            if isinstance(waited_s := event.get("waited_s"), float):
                self._ends.setdefault(Phase.IMPORTS, at - waited_s)
            self.reached(Phase.RENDEZVOUS, at)
        elif phase := _EVENTS.get(kind):
            self.reached(phase, at)

    def _write(self, ends: dict[Phase, float]) -> None:
        paths, number = self._attempt.paths, self._attempt.number
        for phase, name in _VARIABLES.items():
            with contextlib.suppress(KeyError, ValueError):
                ends[phase] = float(os.environ[name])
        if taken := taken_at(paths, number):
            ends[Phase.PROLOG] = taken
        with contextlib.suppress(OSError):  # only `status` reads it
            write_start(paths, number, ends, self.not_forked)
