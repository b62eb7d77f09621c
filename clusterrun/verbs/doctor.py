"""Check a job before it is queued: machine, Python and Slurm here, or nodes by a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterrun.backends import select
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.slurm import site as slurm
from clusterrun.backends.slurm.outlook import explained
from clusterrun.backends.slurm.reasons import PendingReason
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.config import choices
from clusterrun.config.choices import Cluster, Device
from clusterrun.config.settings import Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError, UsageError, describe
from clusterrun.health import paths, toolchain, trial
from clusterrun.health.examine import Check, UnknownError, merged, to_exclude
from clusterrun.health.examine import examine as side_by_side
from clusterrun.health.gpus import LONG_S, GpuAnswer
from clusterrun.health.node import Needs, all_checks, pages, plugin_checks, quick_checks
from clusterrun.launch.facts import Interpreter
from clusterrun.launch.inputs import interpreter_problem, is_certain, runs_in_container
from clusterrun.launch.plan import Plan
from clusterrun.launch.sbatch_header import END_OTHERS, KEEP_OTHERS
from clusterrun.node.base.identity import local_node
from clusterrun.node.recovery.printed import LAST_BYTES, last_reason, last_word, reason_of
from clusterrun.rendering.bundle import render_bundle
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell
from clusterrun.shared.files import end_of
from clusterrun.shared.finding import Finding, Severity, bad, fail, note, ok, skip
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist
from clusterrun.shared.installed import PluginGroup, load_all, plugin_text, plugins
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count, dotted
from clusterrun.verbs.diagnose import causes
from clusterrun.verbs.render import Prepared, check, prepare
from clusterrun.verbs.submit import submit_prepared

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEADLINE_S: Final = 4.0  # a domain that a file system, a driver or Slurm blocks is left behind
STAND_IN: Final = "__hello__"  # a module that every Python has, for a job without a script
ALONE: Final = ("slurm.submit",)  # it may be slow
_OF_THIS_MACHINE: Final[tuple[str, ...]] = ("cuda.driver", "gpu.", "node.")
HERE: Final = ("config.", "env.", "python.", "slurm.", "path.runs")  # before the nodes are checked


class Subject:
    """The job that is checked; what several checks ask about it is asked once."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.plan = prepared, prepared.plan
        self.spec = prepared.resolved.spec
        self.interpreter = prepared.facts.interpreter if prepared.facts else Interpreter()

    @property
    def needs(self) -> Needs:
        """What a node needs."""
        needs, named = Needs.of(self.plan, is_head=True), self.plan.gpu_ids
        return dataclasses.replace(needs, gpus=named) if named and needs.gpus is not None else needs

    @property
    def python(self) -> Interpreter:
        """The job's interpreter. Raises UnknownError if that is elsewhere."""
        self.refuse_container()
        if not self.interpreter.path and self.spec.setup:
            raise UnknownError("only the nodes know the interpreter: the setup lines provide it")
        return self.interpreter

    @property
    def is_sure(self) -> bool:
        """Whether the nodes find the same packages; without a script, no job needs them."""
        facts = self.prepared.facts
        return self.spec.module != STAND_IN and facts is not None and is_certain(self.spec, facts)

    def refuse_container(self) -> None:
        """Raise UnknownError if the job runs in a container."""
        if runs_in_container(self.spec):
            raise UnknownError("the job runs in a container, which has its own programs")

    def refuse_without_operators(self) -> None:
        """Raise UnknownError unless DeepSpeed compiles its optimizer when the job starts."""
        strategy = self.plan.strategy
        if not (strategy.is_deepspeed and strategy.offload):
            raise UnknownError(f"strategy {strategy.value} builds no DeepSpeed operators")

    @property
    def cuda(self) -> str | None:
        """The CUDA of the job's torch; "" for none, None if unknown."""
        found = self.interpreter
        return toolchain.cuda_of_torch(found.places, found.packages.get("torch", ""))

    @cached_property
    def gpus(self) -> GpuAnswer | None:
        """The GPUs here that the job may use; all if it runs elsewhere, None if it uses none."""
        return self.needs.gpu_answer(LONG_S)

    @cached_property
    def controller(self) -> Finding:
        """Whether slurmctld answers. Raises UnknownError if it can't be asked."""
        self.refuse_other_cluster()
        if shell.find("scontrol") is None:
            raise UnknownError("scontrol was not found")
        return slurm.controller(self.plan)

    @property
    def queued(self) -> Plan:
        """The plan, for a Slurm that answers. Raises UnknownError if it does not."""
        if self.controller.severity is Severity.FAIL:
            raise UnknownError("slurmctld does not answer")
        return self.plan

    def refuse_other_cluster(self) -> None:
        """Raise UnknownError if the job does not run on Slurm."""
        is_slurm = self.plan.cluster.scheduler.reads_sbatch
        if not is_slurm:  # a `Lack`: its text says why
            is_asked = self.spec.cluster is not Cluster.AUTO
            raise UnknownError(is_slurm if is_asked else "no sbatch here")


def subject_of(resolved: Resolved) -> Subject:
    """Prepare a job as `render` does, without a script with STAND_IN instead. Raises UsageError."""
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        resolved = resolved._replace(spec=dataclasses.replace(spec, module=STAND_IN))
    return Subject(prepare(resolved, is_again=True))  # its notes are not printed


def _check_job(job: Subject) -> Finding:
    name, plan, facts = "config.job", job.plan, job.prepared.facts
    is_of_python = facts and interpreter_problem(job.spec, facts, plan.strategy)
    if (problem := job.prepared.problem) and not is_of_python:  # that is for `_check_packages`
        text = ": ".join(filter(None, (problem.where, describe(problem))))
        return fail(name, text, "; ".join(problem.hints) or "clusterrun render --help")
    where = f", on {count(len(plan.hosts), 'host')}" if plan.hosts else ""
    if plan.cluster.scheduler.is_this_machine:
        where = f", on this machine ({plan.device.value})"
    return ok(name, f"{plan.nodes} x {plan.procs_per_node} ranks, {plan.strategy.value}{where}")


def _check_environment(_: Subject) -> Finding:
    name, kept = "env.left_over", scrubbed(os.environ)
    # `scrubbed` keeps NCCL_TIMEOUT, but NCCL does not read it.
    names = [each for each in sorted(os.environ) if each not in kept or each == "NCCL_TIMEOUT"]
    if not names:
        return ok(name, "no variables of another job or launcher are set")
    text = f"set in your shell: {', '.join(names)}; submit removes them or reads them as options"
    return note(name, text, f"unset {' '.join(names)}, or use a new shell")


def _check_plugins(_: Subject) -> Finding:
    def check_scheduler(plugin: EntryPoint) -> None:
        if not isinstance(plugin.load(), choices.Scheduler):
            raise TypeError(f"{plugin.value} is not a clusterrun Scheduler")

    schedulers = load_all(PluginGroup.SCHEDULERS, check_scheduler)[1]
    found = "; ".join(plugin_text(each) for group in PluginGroup for each in plugins(group))
    if broken := (*schedulers, *plugin_checks(), *causes()[1]):
        return note(
            "config.plugins", "; ".join(broken), "correct or reinstall the package, or uninstall it"
        )
    return ok("config.plugins", found or "no installed package adds to clusterrun")


def _check_packages(job: Subject) -> Finding:
    name, python, facts = "python.packages", job.python, job.prepared.facts
    if facts and (problem := interpreter_problem(job.spec, facts, job.plan.strategy)):
        return bad(name, problem.message, "; ".join(problem.hints), is_sure=job.is_sure)
    if python.version is None or not python.is_known:
        return skip(name, f"cannot tell which packages {python.path or 'the interpreter'} has")
    packages = [f"{each} {version}" for each, version in python.packages.items() if version]
    return ok(name, f"{python.path}: Python {dotted(python.version)}, {', '.join(packages)}")


def _check_compiler(job: Subject) -> Finding:
    job.refuse_without_operators()
    environ = {**os.environ, **job.spec.env}
    return toolchain.compiler(job.python, environ, is_sure=not job.spec.setup)


def _check_toolkit(job: Subject) -> Finding:
    job.refuse_container()
    job.refuse_without_operators()
    if job.plan.device is not Device.CUDA:
        raise UnknownError("this job uses no GPU")
    environ = {**os.environ, **job.spec.env}
    return toolchain.toolkit(job.cuda, environ, is_sure=not job.spec.setup)


def _check_submission(job: Subject) -> Finding:
    job.refuse_other_cluster()
    if shell.find("sbatch") is None:
        raise UnknownError("sbatch was not found")
    try:
        check(job.prepared._replace(problem=None))  # `_check_job` reports the problem
    except SchedulerUnreachableError:
        raise
    except ClusterrunError as error:
        hint = "; ".join(error.hints) or "print the batch script: clusterrun render"
        return fail("slurm.submit", describe(error), hint)
    return ok("slurm.submit", "sbatch accepts the job")


_OF_JOB: Final[dict[str, Callable[[Subject], Finding]]] = {
    "config.job": _check_job,
    "config.plugins": _check_plugins,
    "env.left_over": _check_environment,
    "python.packages": _check_packages,
    "python.torch": lambda job: toolchain.torch(
        job.python, job.cuda, on_gpus=job.plan.device is Device.CUDA, is_sure=job.is_sure
    ),
    "python.compiler": _check_compiler,
    "cuda.driver": lambda job: toolchain.driver(job.cuda, job.gpus or GpuAnswer(within_s=LONG_S)),
    "cuda.toolkit": _check_toolkit,
    "path.runs": lambda job: paths.runs(
        Path(job.plan.runs_dir), is_shared=bool(job.plan.cluster.scheduler.shares_files)
    ),
    "slurm.controller": lambda job: job.controller,
    "slurm.partition": lambda job: slurm.partition(job.queued),
    "slurm.nodes": lambda job: slurm.nodes(job.queued),
    "slurm.limits": lambda job: slurm.limits(job.queued),
    "slurm.submit": _check_submission,
}


def places(name: str) -> Iterator[str]:
    """Yield where a check runs, in words."""
    needs = Needs(runs=Path(), gpus=())  # for the names of checks only
    is_of_job, is_of_nodes = name in _OF_JOB, name in all_checks(needs)
    if is_of_job or is_of_nodes:
        is_unsure = name.startswith(_OF_THIS_MACHINE)
        but = "; if the job runs on Slurm, a failure here is a note" if is_unsure else ""
        yield f"this machine: clusterrun doctor{but}"
    if is_of_nodes or not is_of_job:
        yield "the nodes: clusterrun doctor --nodes N"
    if name in quick_checks(needs):
        yield "the nodes of each job, before the ranks start: the preflight"


def chosen_checks(job: Subject, only: Sequence[str], without: Sequence[str]) -> dict[str, Check]:
    """Return the chosen checks of this machine by id, in the order of their pages."""
    for prefix in (*only, *without):
        if not any(name.startswith(prefix) for name in pages()):
            hint = "list them with: clusterrun explain all"
            raise UsageError(f"no check has an id that begins with '{prefix}'", hint=hint)
    checks = all_checks(job.needs, job.gpus)
    is_here = job.plan.cluster.scheduler.is_this_machine
    if not is_here:  # a `Lack`: its text says why
        checks |= {name: partial(skip, name, str(is_here)) for name in ("node.memory", "gpu.count")}
    checks |= {name: partial(probe, job) for name, probe in _OF_JOB.items()}
    if not (only or job.plan.cluster.scheduler.reads_sbatch):
        without = (*without, "slurm.")  # unless the user asks for them
    names = (name for name in pages() if name in checks and is_chosen(name, only, without))
    return {name: checks[name] for name in names}


def is_chosen(name: str, only: Sequence[str], without: Sequence[str]) -> bool:
    """Return whether an id begins with one of `only`, if there are any, and none of `without`."""
    return name.startswith(tuple(only) or "") and not name.startswith(tuple(without))


def examine(
    job: Subject, checks: Mapping[str, Check], *, before_nodes: bool = False
) -> list[Finding]:
    """Run checks of a job; `before_nodes`: only those that the nodes do not run later.

    What would fail here may not fail where the job runs: such a failure becomes a note.
    """
    unsure = () if job.plan.cluster.scheduler.is_this_machine else _OF_THIS_MACHINE
    if before_nodes:  # the nodes will show whether they see the runs
        checks = {name: each for name, each in checks.items() if name.startswith(HERE)}
        unsure = (*unsure, "path.runs")
    if_late = {"path.runs": paths.slow_finding(Path(job.plan.runs_dir))}
    found = side_by_side(checks, DEADLINE_S, alone=ALONE, late=if_late)  # ALONE: in own threads
    return [
        dataclasses.replace(each, severity=Severity.NOTE)
        if each.severity is Severity.FAIL and each.id.startswith(unsure)
        else each
        for each in found
    ]


# On the nodes: a run of `health.trial`, and what its nodes find

NAME: Final = "doctor"
SCRIPT: Final = "clusterrun.health.trial"
MINUTES: Final = 5
REACH_S: Final = 60  # for a node to reach the first, which may start so much later
BLOCKED_S: Final = 20.0  # for a job that may never start as things are
POLL_S, POLL_NODE_S = 0.3, 0.001  # between two readings of the reports, and more for each node
QUERY_S: Final = 5.0  # a scheduler's answer may be so old
START_S: Final = 300.0  # from a job's start to that of its script: a prolog may be slow
_NOT_LAUNCHED: Final = r"(?m)^srun: error: Task launch for \S+ failed on node (\S+?): "
LATE_S: Final = 5.0  # how much later than the first node the others may end


@dataclass(kw_only=True)
class Smoke:
    """What the nodes of a job found."""

    job_id: str
    run_dir: Path
    has_slurm: bool = True
    nodes: tuple[str, ...] = ()
    found: dict[str, trial.NodeReport] = field(default_factory=dict)
    met: tuple[str, ...] | None = None  # nodes whose ranks met; None: none did
    waited_s: float = 0.0  # for their reports, after the start of the job
    unstarted: tuple[str, ...] = ()  # nodes on which Slurm could not start its script
    blocked: str = ""  # why the job does not start
    end: JobState | None = None  # if it ended before a node had reported


def check_nodes(resolved: Resolved, progress: Callable[[str], None]) -> Smoke:
    """Check the nodes that a configuration requests; `progress` gets a line about what changed.

    If the job does not start on some nodes, the others get their own. Raises as `submit` does.
    """
    found = _follow(_submit_trial(resolved), progress)
    others = [node for node in found.nodes if node not in found.unstarted]
    if not (found.unstarted and others):
        return found
    without = fold_hosts(found.unstarted)
    progress(f"job {found.job_id} does not start on {without}; starting another without it")
    spec = dataclasses.replace(resolved.spec, nodes=len(others))
    if spec.nodelist:
        spec = dataclasses.replace(spec, nodelist=",".join(others))
    else:
        spec = dataclasses.replace(spec, exclude=",".join(filter(None, (spec.exclude, without))))
    again = _follow(_submit_trial(resolved._replace(spec=spec)), progress)
    again.nodes, again.unstarted = (*found.unstarted, *again.nodes), found.unstarted
    return again


def _submit_trial(resolved: Resolved) -> JobRecord:
    """Submit the trial as a job, with the nodes and options that a configuration requests."""
    spec, plain = resolved.spec, JobSpec()
    limit = resolved.origins["slurm.time"]
    has_limit = limit.is_of_user and limit.where is None  # on the command line
    # What the script of the job needs, the trial does not.
    unset = "script args strategy accelerate_config deepspeed_config stage spare_nodes"
    unset += " dependency begin hold mail_type"
    spec = dataclasses.replace(
        spec,
        **{name: getattr(plain, name) for name in unset.split()},
        module=SCRIPT,
        name=NAME,
        time_minutes=spec.time_minutes if has_limit else MINUTES,
        mixed_precision=choices.MixedPrecision.NO,
        launcher=choices.Launcher.ACCELERATE,
        preflight=choices.Preflight.OFF,
        world_contract=False,  # nodes that are broken are left out
        rendezvous_timeout_s=REACH_S,
        on_interrupt=choices.OnInterrupt.STOP,
        requeue=False,
        max_restarts=0,
    )
    prepared = prepare(resolved._replace(spec=spec))
    # If the script fails on a node, srun must not end it on the others.
    srun_args = (KEEP_OTHERS if each == END_OTHERS else each for each in prepared.plan.srun_args)
    plan = dataclasses.replace(prepared.plan, is_smoke=True, srun_args=tuple(srun_args))
    bundle = render_bundle(plan, resolved_yaml=prepared.resolved.to_yaml())
    return submit_prepared(prepared._replace(plan=plan, bundle=bundle), is_shared=True)


def _follow(record: JobRecord, progress: Callable[[str], None]) -> Smoke:
    """Wait until the nodes have reported, or their time is up, and end the job."""
    smoke = _GrowingSmoke(record, progress)
    try:
        while not smoke.update():
            time.sleep(POLL_S + record.nodes * POLL_NODE_S)
        return smoke
    except KeyboardInterrupt:
        progress(f"job {record.job_id} is cancelled")
        raise
    finally:
        is_over = smoke.now.state.is_terminal and not smoke.unstarted
        is_done = len(smoke.found) == record.nodes and all(x.is_done for x in smoke.found.values())
        if not (is_done or is_over):  # after srun gave up, a job may wait half a minute for nodes
            with contextlib.suppress(ClusterrunError):
                select.backend_of(record).cancel([record.job_id])


class _GrowingSmoke(Smoke):
    """What the nodes of a job have found so far; `now` is its status."""

    def __init__(self, record: JobRecord, progress: Callable[[str], None]) -> None:
        super().__init__(job_id=record.job_id, run_dir=record.paths.root)
        self.has_slurm = bool(record.cluster.scheduler.reads_sbatch)
        self._record, self._progress = record, progress
        self.now = JobStatus(record=record, state=JobState.PENDING)
        self._reported = ""
        self._unexplained: PendingReason | None = None  # why the job waits, as Slurm last said
        self._explained: PendingReason | None = None  # the same, with what another call added
        self._started_at = self._done_at = self._blocked_at = 0.0  # 0: not yet

    def update(self) -> bool:
        """Read the nodes' reports (`met`: whose ranks met); return whether no more is to come."""
        at = time.monotonic()
        (self.now,) = statuses([self._record], select.backend_of, max_age_s=QUERY_S)
        if self.now.state is JobState.PENDING:
            return self._check_queue(at)  # it sets `blocked` or `unstarted`
        if self.now.state is JobState.RUNNING and not self.nodes:
            self._started_at = self._started_at or at
            self.nodes = self._allocated()
        self.waited_s = at - (self._started_at or at)
        self.found, number = trial.read_nodes(self.run_dir), self._record.nodes
        self.met = next((x.met for x in self.found.values() if x.met is not None), None)
        self._report(f"job {self.job_id}: {len(self.found)} of {number} nodes reported")
        done = [each for each in self.found.values() if each.is_done]
        if self.found and (len(done) == len(self.found) or self.met is not None):
            self._done_at = self._done_at or at  # the others have LATE_S from here
        are_others_late = self._done_at and at - self._done_at > LATE_S
        is_over = self.now.state.is_terminal or self.waited_s > START_S
        is_finished = len(done) == number or are_others_late or is_over
        if not is_finished:
            return False
        if is_over and len(done) < number:
            self._find_unstarted()
        self.nodes = self.nodes or tuple(self.found)
        self.end = self.now.state if self.now.state.is_terminal and not self.found else None
        return True

    def _find_unstarted(self) -> None:
        """Set `unstarted`: where the script did not start; the first node if it started nowhere."""
        paths = self._record.paths
        self.unstarted = self.nodes[:1]
        if paths.attempt_record(1).exists() or paths.end.exists():  # it started on the first
            # `srun` ends all others if the daemon of a node does not answer it.
            printed = end_of(paths.batch_output, LAST_BYTES).decode("utf-8", "replace")
            self.unstarted = tuple(dict.fromkeys(re.findall(_NOT_LAUNCHED, printed)))

    def _check_queue(self, at: float) -> bool:
        """Report why the job is pending; return whether it cannot, or may never, start."""
        if self.nodes:  # requeued: the first node did not start its script
            self.unstarted = self.nodes[:1]
            return True
        if self.now.pending != self._unexplained:  # the explanation asks Slurm once more
            self._unexplained, self._explained = self.now.pending, explained(self.now).pending
        pending = self._explained
        why = (pending.text or pending.code) if pending else ""
        self._report(f"job {self.job_id} waits: {why}; Ctrl-C cancels it")
        is_blocked = pending is not None and not pending.can_start
        self._blocked_at = (self._blocked_at or at) if is_blocked else 0.0
        self.blocked = why if is_blocked and at - self._blocked_at > BLOCKED_S else ""
        return bool(self.blocked)

    def _allocated(self) -> tuple[str, ...]:
        """Return the nodes of the job; () until all are known."""
        if self._record.cluster.scheduler.is_this_machine:
            return tuple(map(local_node, range(self._record.nodes)))
        with contextlib.suppress(ClusterrunError):
            names = tuple(parse_hostlist(self.now.nodelist))
            # Until the scheduler answers, `nodelist` has only the nodes whose agents met.
            return names if len(names) == self._record.nodes else ()
        return ()

    def _report(self, text: str) -> None:
        if text != self._reported:
            self._reported = text
            self._progress(text)


def findings(smoke: Smoke) -> tuple[list[Finding], str]:
    """Return what the nodes found, and a host list of those to leave out."""
    output = RunPaths(root=smoke.run_dir).batch_output
    if smoke.blocked:
        text = f"job {smoke.job_id} does not start: {smoke.blocked}"
        listing = "list the nodes with sinfo -N -l; " if smoke.has_slurm else ""
        return _without_nodes(smoke, text, f"{listing}request others, or fewer with --nodes")
    if smoke.end is not None:
        reason = last_reason(output, 0, smoke.nodes) or last_word(output, or_any=True)
        why = reason or "no node has reported"
        text = f"job {smoke.job_id} is {smoke.end.value}: {why}"
        hint = f"read its output: clusterrun logs {smoke.job_id} --stream batch"
        return _without_nodes(smoke, text, hint)
    nodes, found = smoke.nodes, smoke.found
    reasons = {node: reason_of(output, node) for node in nodes if node not in found}
    by_node = trial.judge_nodes(
        nodes, found, smoke.met, smoke.unstarted, reasons, smoke.waited_s, has_slurm=smoke.has_slurm
    )
    group = trial.compare_nodes(nodes, found, smoke.met)
    # Of each node, the first finding says whether the node reported.
    reports = {node: checks[:1] for node, checks in by_node.items()}
    others = {node: checks[1:] for node, checks in by_node.items() if node in found}
    # A check of all nodes together may fail on one because of another.
    own = {node: [x for x in checks if x.id != trial.OF_ALL] for node, checks in by_node.items()}
    return [*merged(reports), *merged(others), *group], to_exclude(own)


def _without_nodes(smoke: Smoke, text: str, hint: str) -> tuple[list[Finding], str]:
    """Return why no node reported, and the nodes on which an earlier job could not start."""
    unstarted = {node: [trial.unreported(node, trial.UNSTARTED)] for node in smoke.unstarted}
    return [*merged(unstarted), fail("node.report", text, hint)], fold_hosts(smoke.unstarted)
