"""Submit a smoke job, and gather what its nodes find: each alone, then all together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterrun.backends import select
from clusterrun.backends.slurm.outlook import explained
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config import Resolved
from clusterrun.config.spec import OnInterrupt
from clusterrun.errors import ClusterrunError
from clusterrun.health import reports
from clusterrun.health.reports import GroupReport, NodeReport
from clusterrun.launch.sbatch_header import END_OTHERS, KEEP_OTHERS
from clusterrun.node.base.identity import local_node
from clusterrun.rendering.bundle import render_bundle
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.verbs.render import Prepared, prepare
from clusterrun.verbs.submit import submit_prepared

NAME: Final = "doctor"
STAND_IN: Final = "__hello__"  # nothing trains; every Python has this module
MINUTES: Final = 5
BLOCKED_S: Final = 20.0  # for a job that may never start as things are
LOOK_S, LOOK_NODE_S = 0.3, 0.001  # between two looks at the reports, and more for each node
QUERY_S: Final = 2.0  # a scheduler's answer may be so old
QUERY_MOST_S: Final = 30.0  # the same for a job that has waited long
START_S: Final = 300.0  # from a job's start to that of its script: a prolog may be slow
REPORT_S, NODE_S = 60.0, 0.1  # for the nodes of a job that runs, and more for each node
LATE_S, LATE = 5.0, 2.0  # how much later than the first node one may report, and as a factor


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """What the nodes of a job found; on `unstarted`, the first, Slurm could not start its script.

    `waited_s`: for nodes to report, after the job's start. `blocked`: why the job does not start.
    `end`: it ended before its nodes had reported.
    """

    job_id: str
    run_dir: Path
    nodes: tuple[str, ...] = ()
    found: dict[str, NodeReport] = field(default_factory=dict)
    group: GroupReport | None = None
    waited_s: float = 0.0
    unstarted: str = ""
    blocked: str = ""
    end: JobState | None = None


def run(resolved: Resolved, progress: Callable[[str], None]) -> Smoke:
    """Check the nodes that a configuration requests; `progress` gets a line about what changed.

    If the first node of the job is stuck, the others get a job of their own. Raises as `submit`
    does.
    """
    found = _follow(_submit(resolved), progress)
    if not found.unstarted or len(found.nodes) < 2:
        return found
    progress(f"job {found.job_id} does not start on {found.unstarted}: another job without it")
    spec, (first, *rest) = resolved.spec, found.nodes
    spec = dataclasses.replace(spec, nodes=len(rest))
    if spec.nodelist:
        spec = dataclasses.replace(spec, nodelist=",".join(rest))
    else:
        spec = dataclasses.replace(spec, exclude=",".join(filter(None, (spec.exclude, first))))
    others = _follow(_submit(resolved._replace(spec=spec)), progress)
    return dataclasses.replace(others, nodes=(first, *others.nodes), unstarted=first)


def _submit(resolved: Resolved) -> JobRecord:
    spec = resolved.spec
    has_limit = resolved.origins["slurm.time"].is_typed
    spec = dataclasses.replace(
        spec,
        script=None,
        args=(),
        module=STAND_IN,
        name=NAME,
        time_minutes=spec.time_minutes if has_limit else MINUTES,
        on_interrupt=OnInterrupt.STOP,
        requeue=False,
        dependency=None,
        begin=None,
        hold=False,
        mail_type=None,
        spare_nodes=0,
        max_restarts=0,
    )
    return submit_prepared(_as_smoke(prepare(resolved._replace(spec=spec))), is_shared=True)


def _as_smoke(prepared: Prepared) -> Prepared:
    srun_args = (KEEP_OTHERS if each == END_OTHERS else each for each in prepared.plan.srun_args)
    plan = dataclasses.replace(prepared.plan, is_smoke=True, srun_args=tuple(srun_args))
    bundle = render_bundle(plan, resolved_yaml=prepared.resolved.to_yaml())
    return prepared._replace(plan=plan, bundle=bundle)


def _follow(record: JobRecord, progress: Callable[[str], None]) -> Smoke:
    """Wait until the nodes have reported, or their time is up, and end the job."""
    gathering = _Gathering(record, progress)
    try:
        while not gathering.look():
            time.sleep(LOOK_S + record.nodes * LOOK_NODE_S)
        return gathering.result()
    except KeyboardInterrupt:
        progress(f"job {record.job_id} is cancelled")
        raise
    finally:
        gathering.end()


class _Gathering:
    """A smoke job that is being followed."""

    def __init__(self, record: JobRecord, progress: Callable[[str], None]) -> None:
        self._record, self._progress = record, progress
        self._root = record.paths.root
        self._nodes: tuple[str, ...] = ()
        self._now = JobStatus(record=record, state=JobState.PENDING)
        self._submitted_at = time.monotonic()
        self._started_at: float | None = None
        self._first_after_s: float | None = None
        self._done_at: float | None = None
        self._unstarted = ""
        self._blocked = ""
        self._blocked_at: float | None = None
        self._ends_now = False  # all nodes are done
        self._lost: set[str] = set()
        self._done: dict[str, NodeReport] = {}
        self._told = ""

    def look(self) -> bool:
        """Look once; return whether nothing more is to come."""
        self._now = self._status()
        if self._now.state is JobState.PENDING:
            return self._waits()
        if self._now.state is JobState.RUNNING and not self._nodes:
            self._nodes, self._started_at = self._allocated(), time.monotonic()
        seen, number = reports.reported(self._root), self._record.nodes
        self._tell(f"job {self._record.job_id}: {len(seen)} of {number} nodes reported")
        if seen and self._first_after_s is None:
            self._first_after_s = self._waited_s
        if self._are_done() and (len(seen) == number or self._are_others_late()):
            self._ends_now = len(seen) == number and not self._lost
            return True
        if self._now.state.is_terminal:
            self._unstarted = "" if seen or self._has_begun() else self._first
            return True
        return self._is_late()

    @property
    def _waited_s(self) -> float:
        """Return for how long the job has run."""
        return time.monotonic() - (self._started_at or time.monotonic())

    def _are_others_late(self) -> bool:
        """Return whether nodes that have not reported have had their time: setup lines vary.

        A node whose script has started may be busy: it has as long as the first one.
        """
        self._done_at = self._done_at or time.monotonic()
        begun = len(list(self._record.paths.owner(1).parent.glob("begun.*")))
        patience_s = LATE_S + LATE * (self._first_after_s or 0.0)
        if begun == self._record.nodes:
            patience_s = max(REPORT_S, patience_s)
        return time.monotonic() - self._done_at > patience_s

    def _status(self) -> JobStatus:
        waits = self._started_at is None
        waited_s = time.monotonic() - self._submitted_at if waits else 0.0
        age_s = min(QUERY_MOST_S, max(QUERY_S, waited_s / 20))
        (found,) = statuses([self._record], select.backend_of, max_age_s=age_s)
        return found

    @property
    def _first(self) -> str:
        return next(iter(self._nodes), "")

    def _has_begun(self) -> bool:
        """Return whether the job's script has started."""
        return self._record.paths.owner(1).exists() or self._record.paths.end.exists()

    def _waits(self) -> bool:
        """Return whether to give up: it could not be started, or may never start."""
        if self._nodes:
            self._unstarted = self._first
            return True
        pending = explained(self._now).pending if not self._told else self._now.pending
        why = (pending.text or pending.code) if pending else ""
        self._tell(f"job {self._record.job_id} waits: {why}; Ctrl-C cancels it")
        if pending is None or pending.can_start:
            self._blocked, self._blocked_at = "", None
            return False
        self._blocked, self._blocked_at = why, self._blocked_at or time.monotonic()
        return time.monotonic() - self._blocked_at > BLOCKED_S

    def _allocated(self) -> tuple[str, ...]:
        if self._record.cluster.scheduler.is_this_machine:
            return tuple(map(local_node, range(self._record.nodes)))
        with contextlib.suppress(ClusterrunError):
            return tuple(parse_hostlist(self._now.nodelist))
        return ()

    def _are_done(self) -> bool:
        group = reports.read_group(self._root)
        if group is None:
            return False
        self._lost = set(group.lost)
        awaited = (group.shares.keys() | reports.reported(self._root)) - self._lost
        for node in awaited - self._done.keys():
            report = reports.read_node(self._root, node)
            if report is None or report.computed is None:
                return False
            if node not in group.shares and not _has_met(report):
                return False
            self._done[node] = report
        return True

    def _is_late(self) -> bool:
        if not self._has_begun():
            self._unstarted = self._first if self._waited_s > START_S else ""
            return bool(self._unstarted)
        return self._waited_s > START_S + REPORT_S + NODE_S * self._record.nodes

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._progress(text)

    def result(self) -> Smoke:
        """Return what was gathered."""
        found = {**reports.read_nodes(self._root, besides=self._done), **self._done}
        return Smoke(
            job_id=self._record.job_id,
            run_dir=self._root,
            nodes=self._nodes or tuple(found),
            found=found,
            group=reports.read_group(self._root),
            waited_s=self._waited_s,
            unstarted=self._unstarted,
            blocked=self._blocked,
            end=self._now.state if self._now.state.is_terminal and not found else None,
        )

    def end(self) -> None:
        """End the job unless it ends now; also if the user interrupts."""
        if not (self._ends_now or self._now.state.is_terminal):
            with contextlib.suppress(ClusterrunError):
                select.backend_of(self._record).cancel([self._record.job_id])


def _has_met(report: NodeReport) -> bool:
    """Return whether a node outside the group reported why."""
    return any(each.id == "net.meet" for each in report.checks)
