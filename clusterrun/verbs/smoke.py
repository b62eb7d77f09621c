"""Submit a smoke job, and gather what its nodes find: each alone, then all together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterrun.backends import select
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config import Resolved
from clusterrun.config.settings import BUILT_IN
from clusterrun.config.spec import Cluster, OnInterrupt
from clusterrun.errors import ClusterrunError
from clusterrun.health import reports
from clusterrun.health.reports import GroupReport, NodeReport
from clusterrun.rendering.bundle import render_bundle
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.submit import submit_prepared

NAME: Final = "doctor"
MODULE: Final = "__hello__"  # nothing trains; every Python has this module
MINUTES: Final = 5
LOOK_S: Final = 0.3
QUERY_S: Final = 2.0  # a scheduler's answer may be so old
START_S: Final = 8.0  # for the script of a job that runs to start on its first node
ALONE_S, NODE_S = 60.0, 0.1  # for the nodes of a job that runs, and more for each node


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """What the nodes found. `nodes`: those of the job; `unstarted`: it could not start on it."""

    job_id: str
    run_dir: Path
    nodes: tuple[str, ...] = ()
    found: dict[str, NodeReport] = field(default_factory=dict)
    group: GroupReport | None = None
    unstarted: str = ""
    end: JobState | None = None


def submit(resolved: Resolved) -> JobRecord:
    """Submit a smoke job on the nodes that a configuration requests. Raises as `submit` does."""
    spec = resolved.spec
    has_limit = resolved.origins["slurm.time"] != BUILT_IN
    spec = dataclasses.replace(
        spec,
        script=None,
        args=(),
        module=MODULE,
        name=NAME,
        time_minutes=spec.time_minutes if has_limit else MINUTES,
        on_interrupt=OnInterrupt.STOP,
        spare_nodes=0,
        max_restarts=0,
    )
    return submit_prepared(_as_smoke(prepare(dataclasses.replace(resolved, spec=spec))))


def _as_smoke(prepared: Prepared) -> Prepared:
    plan = dataclasses.replace(prepared.plan, is_smoke=True)
    bundle = render_bundle(plan, resolved_yaml=prepared.resolved.to_yaml())
    return dataclasses.replace(prepared, plan=plan, bundle=bundle)


def follow(record: JobRecord, progress: Callable[[str], None]) -> Smoke:
    """Wait until the nodes have reported, or their time is up, and end the job.

    `progress` gets a line if something has changed.
    """
    gathering = Gathering(record, progress)
    try:
        while not gathering.is_complete():
            time.sleep(LOOK_S)
        return gathering.result()
    finally:
        gathering.end()


class Gathering:
    """A smoke job that is being followed."""

    def __init__(self, record: JobRecord, progress: Callable[[str], None]) -> None:
        self._record, self._progress = record, progress
        self._root = record.paths.root
        self._now = _status(record)
        self._started_at: float | None = None
        self._second: subprocess.Popen[bytes] | None = None
        self._unstarted = ""
        self._has_all = False
        self._told = ""

    @property
    def _nodes(self) -> tuple[str, ...]:
        if self._record.cluster is Cluster.LOCAL:
            return tuple(f"local{rank}" for rank in range(self._record.nodes))
        with contextlib.suppress(ClusterrunError):
            return tuple(parse_hostlist(self._now.nodelist))
        return ()

    def is_complete(self) -> bool:
        """Look once; return whether nothing more is to come."""
        self._now = _status(self._record)
        if self._now.state is JobState.PENDING:
            why = self._now.pending.text or self._now.pending.code if self._now.pending else ""
            self._tell(f"job {self._record.job_id} waits: {why}")
            return False
        seen = reports.reported(self._root)
        self._tell(f"job {self._record.job_id}: {len(seen)} of {self._record.nodes} nodes reported")
        if self._have_computed():
            self._has_all = len(seen) == self._record.nodes  # the job is about to end
            return True
        if self._now.state.is_terminal and not self._second:
            return True
        return self._is_late(seen)

    def _have_computed(self) -> bool:
        group = reports.read_group(self._root)
        if group is None:
            return False
        found = reports.read_nodes(self._root)
        return all(node in found and found[node].computed is not None for node in group.shares)

    def _is_late(self, seen: set[str]) -> bool:
        if self._now.state is not JobState.RUNNING:
            return False
        self._started_at = self._started_at or time.monotonic()
        passed = time.monotonic() - self._started_at
        if not seen and not self._unstarted and passed > START_S and not self._has_begun():
            self._start_without_first()
        return passed > ALONE_S + NODE_S * self._record.nodes

    def _has_begun(self) -> bool:
        return self._record.cluster is Cluster.LOCAL or self._record.paths.owner(1).exists()

    def _start_without_first(self) -> None:
        """Start a step on the other nodes: the job's script does not start on the first one."""
        first, *others = self._nodes or ("",)
        self._unstarted = first
        if not others:
            return
        self._tell(f"job {self._record.job_id}: its script does not start on {first}")
        paths = self._record.paths
        paths.attempt(1).mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = (
            *("srun", f"--jobid={self._record.job_id}", "--overlap", f"--nodes={len(others)}"),
            *("--ntasks-per-node=1", f"--nodelist={','.join(others)}"),
            *("bash", str(paths.node_script), str(paths.root), "1"),
        )
        with (self._root / "second-step.out").open("wb") as output:
            self._second = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=scrubbed(os.environ)
            )

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._progress(text)

    def result(self) -> Smoke:
        """Return what was gathered."""
        is_over = self._now.state.is_terminal
        return Smoke(
            job_id=self._record.job_id,
            run_dir=self._root,
            nodes=self._nodes,
            found=reports.read_nodes(self._root),
            group=reports.read_group(self._root),
            unstarted=self._unstarted,
            end=self._now.state if is_over else None,
        )

    def end(self) -> None:
        """End the job unless it ends without that; also if the user interrupts."""
        if self._second is not None:
            self._second.kill()
        if not (self._has_all or self._now.state.is_terminal):
            with contextlib.suppress(ClusterrunError):
                select.backend_of(self._record).cancel([self._record.job_id])


def _status(record: JobRecord) -> JobStatus:
    (found,) = statuses([record], select.backend_of, max_age_s=QUERY_S)
    return found
