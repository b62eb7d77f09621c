"""The checks of `doctor --nodes`: submit a run of `health.trial`, gather what its nodes find."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterrun.backends import select
from clusterrun.backends.slurm.outlook import explained
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config.choices import (
    Launcher,
    MixedPrecision,
    OnInterrupt,
    Preflight,
    Stage,
    Strategy,
)
from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError
from clusterrun.health.compare import merged, to_exclude
from clusterrun.health.examine import Look
from clusterrun.health.together import (
    OF_ALL,
    UNSTARTED,
    NodeReport,
    of_group,
    of_nodes,
    read_nodes,
    unreported,
)
from clusterrun.launch.sbatch_header import END_OTHERS, KEEP_OTHERS
from clusterrun.node.base.identity import local_node
from clusterrun.node.recovery.printed import LAST_BYTES, last_reason, last_word, reason_of
from clusterrun.rendering.bundle import render_bundle
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.files import end_of
from clusterrun.shared.finding import Finding, fail
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist
from clusterrun.shared.state import JobState
from clusterrun.verbs.doctor import Subject, examine, noted
from clusterrun.verbs.render import prepare
from clusterrun.verbs.submit import submit_prepared

NAME: Final = "doctor"
HERE: Final = ("config.", "env.", "python.", "slurm.", "path.runs")
SCRIPT: Final = "clusterrun.health.trial"
MINUTES: Final = 5
REACH_S: Final = 60  # for a node to reach the first, which may start so much later
BLOCKED_S: Final = 20.0  # for a job that may never start as things are
LOOK_S, LOOK_NODE_S = 0.3, 0.001  # between two looks at the reports, and more for each node
QUERY_S: Final = 5.0  # a scheduler's answer may be so old
START_S: Final = 300.0  # from a job's start to that of its script: a prolog may be slow
_NOT_LAUNCHED: Final = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (\S+?): ", re.M
)
LATE_S: Final = 5.0  # how much later than the first node the others may end


@dataclass(kw_only=True)
class Smoke:
    """What the nodes of a job found; on `unstarted` Slurm could not start its script.

    `waited_s`: for nodes to report, after the job's start. `blocked`: why the job does not start.
    `end`: it ended before its nodes had reported.
    """

    job_id: str
    run_dir: Path
    nodes: tuple[str, ...] = ()
    found: dict[str, NodeReport] = field(default_factory=dict)
    met: tuple[str, ...] | None = None
    waited_s: float = 0.0
    unstarted: tuple[str, ...] = ()
    blocked: str = ""
    end: JobState | None = None


def run(resolved: Resolved, progress: Callable[[str], None]) -> Smoke:
    """Check the nodes that a configuration requests; `progress` gets a line about what changed.

    If the job does not start on some nodes, the others get a job of their own. Raises as `submit`
    does.
    """
    found = _follow(_submit(resolved), progress)
    others = [node for node in found.nodes if node not in found.unstarted]
    if not (found.unstarted and others):
        return found
    without = fold_hosts(found.unstarted)
    progress(f"job {found.job_id} does not start on {without}: another job without it")
    spec = dataclasses.replace(resolved.spec, nodes=len(others))
    if spec.nodelist:
        spec = dataclasses.replace(spec, nodelist=",".join(others))
    else:
        spec = dataclasses.replace(spec, exclude=",".join(filter(None, (spec.exclude, without))))
    again = _follow(_submit(resolved._replace(spec=spec)), progress)
    again.nodes, again.unstarted = (*found.unstarted, *again.nodes), found.unstarted
    return again


def _submit(resolved: Resolved) -> JobRecord:
    spec = resolved.spec
    has_limit = resolved.origins["slurm.time"].is_typed
    names = "script accelerate_config deepspeed_config dependency begin mail_type"
    unset: dict[str, Any] = dict.fromkeys(names.split())
    spec = dataclasses.replace(
        spec,
        **unset,
        args=(),
        module=SCRIPT,
        name=NAME,
        time_minutes=spec.time_minutes if has_limit else MINUTES,
        strategy=Strategy.DDP,
        mixed_precision=MixedPrecision.NO,
        launcher=Launcher.ACCELERATE,
        stage=Stage.OFF,
        preflight=Preflight.OFF,
        world_contract=False,  # nodes that are broken are left out
        rendezvous_timeout_s=REACH_S,
        on_interrupt=OnInterrupt.STOP,
        requeue=False,
        hold=False,
        spare_nodes=0,
        max_restarts=0,
    )
    prepared = prepare(resolved._replace(spec=spec))
    srun_args = (KEEP_OTHERS if each == END_OTHERS else each for each in prepared.plan.srun_args)
    plan = dataclasses.replace(prepared.plan, is_smoke=True, srun_args=tuple(srun_args))
    bundle = render_bundle(plan, resolved_yaml=prepared.resolved.to_yaml())
    return submit_prepared(prepared._replace(plan=plan, bundle=bundle), is_shared=True)


def _follow(record: JobRecord, progress: Callable[[str], None]) -> Smoke:
    """Wait until the nodes have reported, or their time is up, and end the job.

    A job that `srun` gave up may still wait half a minute for its nodes.
    """
    smoke = _Gathering(record, progress)
    try:
        while not smoke.look():
            time.sleep(LOOK_S + record.nodes * LOOK_NODE_S)
        return smoke
    except KeyboardInterrupt:
        progress(f"job {record.job_id} is cancelled")
        raise
    finally:
        is_over = smoke.now.state.is_terminal and not smoke.unstarted
        is_done = len(smoke.found) == record.nodes and all(x.is_done for x in smoke.found.values())
        if not (is_done or is_over):
            with contextlib.suppress(ClusterrunError):
                select.backend_of(record).cancel([record.job_id])


class _Gathering(Smoke):
    """What is known of a run of the script that is being followed, and `now` its state."""

    def __init__(self, record: JobRecord, progress: Callable[[str], None]) -> None:
        super().__init__(job_id=record.job_id, run_dir=record.paths.root)
        self._record, self._progress = record, progress
        self.now = JobStatus(record=record, state=JobState.PENDING)
        self._told = ""
        self._started_at = self._done_at = self._blocked_at = 0.0

    def look(self) -> bool:
        """Look once; return whether nothing more is to come."""
        at = time.monotonic()
        (self.now,) = statuses([self._record], select.backend_of, max_age_s=QUERY_S)
        if self.now.state is JobState.PENDING:
            return self._waits(at)
        if self.now.state is JobState.RUNNING and not self.nodes:
            self._started_at = self._started_at or at
            self.nodes = self._allocated()
        self.waited_s = at - (self._started_at or at)
        self.found, number = read_nodes(self.run_dir), self._record.nodes
        self.met = next((x.met for x in self.found.values() if x.met is not None), None)
        self._tell(f"job {self.job_id}: {len(self.found)} of {number} nodes reported")
        done = [each for each in self.found.values() if each.is_done]
        if self.found and (len(done) == len(self.found) or self.met is not None):
            self._done_at = self._done_at or at
        is_late = self._done_at and at - self._done_at > LATE_S
        is_over = self.now.state.is_terminal or self.waited_s > START_S
        if not (is_late or len(done) == number or is_over):
            return False
        if is_over and len(done) < number:
            self._look_for_unstarted()
        self.nodes = self.nodes or tuple(self.found)
        self.end = self.now.state if self.now.state.is_terminal and not self.found else None
        return True

    def _look_for_unstarted(self) -> None:
        """Find the nodes on which the script did not start: the first, if it started nowhere."""
        paths = self._record.paths
        self.unstarted = self.nodes[:1]
        if paths.attempt_record(1).exists() or paths.end.exists():
            # `srun` ends all others if the daemon of a node does not answer it.
            printed = end_of(paths.batch_output, LAST_BYTES).decode("utf-8", "replace")
            self.unstarted = tuple(dict.fromkeys(_NOT_LAUNCHED.findall(printed)))

    def _waits(self, at: float) -> bool:
        """Return whether to give up: it could not be started, or may never start."""
        if self.nodes:
            self.unstarted = self.nodes[:1]
            return True
        pending = explained(self.now).pending if not self._told else self.now.pending
        why = (pending.text or pending.code) if pending else ""
        self._tell(f"job {self.job_id} waits: {why}; Ctrl-C cancels it")
        is_blocked = pending is not None and not pending.can_start
        self._blocked_at = (self._blocked_at or at) if is_blocked else 0.0
        self.blocked = why if is_blocked and at - self._blocked_at > BLOCKED_S else ""
        return bool(self.blocked)

    def _allocated(self) -> tuple[str, ...]:
        if self._record.cluster.scheduler.is_this_machine:
            return tuple(map(local_node, range(self._record.nodes)))
        with contextlib.suppress(ClusterrunError):
            names = tuple(parse_hostlist(self.now.nodelist))
            # Until the scheduler answers, only those are known that met.
            return names if len(names) == self._record.nodes else ()
        return ()

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._progress(text)


# What the run found, as one list


def examine_here(job: Subject, looks: Mapping[str, Look]) -> list[Finding]:
    """Run the checks that concern this machine; the nodes run the others.

    Whether they see the directory of the runs will be known: a guess is only noted.
    """
    here = {name: each for name, each in looks.items() if name.startswith(HERE)}
    return noted(examine(job, here), ("path.runs",))


def findings(smoke: Smoke) -> tuple[list[Finding], str]:
    """Return what the nodes found, and a host list of those to leave out."""
    output = RunPaths(root=smoke.run_dir).batch_output
    if smoke.blocked:
        text = f"job {smoke.job_id} does not start: {smoke.blocked}"
        hint = "list the nodes with sinfo -N -l; request others, or fewer with --nodes"
        return _without_nodes(smoke, text, hint)
    if smoke.end is not None:
        reason = last_reason(output, 0, smoke.nodes) or last_word(output, or_any=True)
        why = reason or "no node has reported"
        text = f"job {smoke.job_id} is {smoke.end.value}: {why}"
        hint = f"read its output: clusterrun logs {smoke.job_id} --stream batch"
        return _without_nodes(smoke, text, hint)
    said = {node: reason_of(output, node) for node in smoke.nodes if node not in smoke.found}
    by_node = of_nodes(smoke.nodes, smoke.found, smoke.met, smoke.unstarted, said, smoke.waited_s)
    group = of_group(smoke.nodes, smoke.found, smoke.met)
    reports = {node: found[:1] for node, found in by_node.items()}
    others = {node: found[1:] for node, found in by_node.items() if node in smoke.found}
    own = {node: [each for each in found if each.id != OF_ALL] for node, found in by_node.items()}
    return [*merged(reports), *merged(others), *group], to_exclude(own)


def _without_nodes(smoke: Smoke, text: str, hint: str) -> tuple[list[Finding], str]:
    """Return why no node reported, and the nodes on which an earlier job could not start."""
    unstarted = [
        dataclasses.replace(unreported(node, UNSTARTED), nodes=(node,)) for node in smoke.unstarted
    ]
    return [*unstarted, fail("node.report", text, hint)], fold_hosts(smoke.unstarted)
