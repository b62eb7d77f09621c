"""Check what can be known about a job before it is queued: machine, Python, network, Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from clusterrun.backends.environment import scrubbed
from clusterrun.backends.machine_facts import choose_cluster
from clusterrun.backends.slurm import health as slurm
from clusterrun.config import Resolved
from clusterrun.config.spec import Cluster, Device
from clusterrun.errors import (
    ClusterrunError,
    ConfigError,
    SchedulerUnreachableError,
    UsageError,
    describe,
)
from clusterrun.health import cuda, paths, python
from clusterrun.health.checks import own_checks, pages
from clusterrun.health.examine import Look, UnknownError
from clusterrun.health.examine import examine as side_by_side
from clusterrun.health.gpu_answer import LONG_S, GpuAnswer
from clusterrun.health.node import Needs, all_looks, quick_looks
from clusterrun.launch.inputs import interpreter_problem, is_certain, runs_in_container
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, Severity, bad, fail, note, ok
from clusterrun.shared.wording import count
from clusterrun.verbs.render import Prepared, check, prepare

DEADLINE_S: Final = 4.0  # a domain that a file system, a driver or Slurm blocks is left behind
STAND_IN: Final = "__hello__"  # a module that every Python has, for a job without a script
ALONE: Final = ("slurm.submit", "net.name")  # each may be slow
_OF_THIS_MACHINE: Final = ("cuda.driver", "gpu.", "node.", "net.")
_CLONE: Final = "'.[train]' in a clone of clusterrun"
_EXPECTED: Final = re.compile(r"Job \d+ to start at (\S+) using .{0,200} nodes (\S+)")


@dataclass
class Subject:
    """The job that is checked: its configuration, or the mistake in it, and its plan."""

    resolved: Resolved | None = None
    prepared: Prepared | None = None
    mistake: UsageError | None = None

    @property
    def ready(self) -> Prepared:
        """The prepared job. Raises UnknownError if there is a mistake in it."""
        if self.prepared is None:
            raise UnknownError("the job's configuration has a mistake")
        return self.prepared

    @property
    def needs(self) -> Needs:
        """What a node needs; that of one rank if there is a mistake in the job."""
        if self.prepared is None:
            return Needs(runs=Path())
        plan = self.prepared.plan
        needs, named = Needs.of(plan, is_head=True), plan.gpu_ids
        return dataclasses.replace(needs, gpus=named) if named and needs.gpus is not None else needs

    @property
    def runs(self) -> Path:
        """The directory of the runs. Raises UnknownError if there is a mistake in the job."""
        return Path(self.ready.plan.runs_dir)

    @cached_property
    def wanted(self) -> python.Wanted:
        """What the job wants from its interpreter. Raises UnknownError if that is elsewhere."""
        self.refuse_container()
        facts, spec = self.ready.facts, self.ready.resolved.spec
        if facts is None or (not facts.interpreter.path and spec.setup):
            raise UnknownError("only the nodes know the interpreter: the setup lines provide it")
        is_sure = spec.module != STAND_IN and is_certain(spec, facts)  # without a script, no job
        return python.Wanted(python=facts.interpreter, oldest=facts.oldest, is_sure=is_sure)

    def refuse_container(self) -> None:
        """Raise UnknownError if the job runs in a container."""
        if runs_in_container(self.ready.resolved.spec):
            raise UnknownError("the job runs in a container, which has its own programs")

    @property
    def has_own_programs(self) -> bool:
        """Whether no setup line adds programs to those of this shell."""
        return not self.ready.resolved.spec.setup

    @property
    def builds_operators(self) -> bool:
        """Whether DeepSpeed compiles its optimizer for the CPU when the job starts."""
        strategy = self.ready.plan.strategy
        return strategy.is_deepspeed and bool(strategy.offload)

    @property
    def cuda(self) -> str | None:
        """The CUDA of the job's torch; "" for none, None if unknown."""
        if self.prepared is None or self.prepared.facts is None:
            return None
        found = self.prepared.facts.interpreter
        return python.cuda_of_torch(found.places, found.packages.get("torch", ""))

    @cached_property
    def gpus(self) -> GpuAnswer | None:
        """The GPUs here that the job may use; all of them if it runs elsewhere, None without."""
        return self.needs.gpu_answer(LONG_S)

    @cached_property
    def controller(self) -> Finding:
        """Whether slurmctld answers. Raises UnknownError if it can't be asked."""
        self.refuse_other_cluster()
        if shell.find("scontrol") is None:
            raise UnknownError("scontrol was not found")
        return slurm.controller(self._site)

    @property
    def site(self) -> slurm.Site:
        """Slurm, for this job. Raises UnknownError if it can't answer."""
        if self.controller.severity is Severity.FAIL:
            raise UnknownError("slurmctld does not answer")
        return self._site

    @cached_property
    def _site(self) -> slurm.Site:
        return slurm.Site(self.ready.plan)

    def refuse_other_cluster(self) -> None:
        """Raise UnknownError if the job does not run on Slurm."""
        asked = self.resolved.spec.cluster if self.resolved else Cluster.AUTO
        if not (answer := choose_cluster(asked).scheduler.reads_sbatch):
            raise UnknownError("no sbatch here" if asked is Cluster.AUTO else answer)


Probe = Callable[[Subject], Finding]


def subject_of(load: Callable[[], Resolved]) -> Subject:
    """Prepare a job as `render` does, and keep the mistake that prevents it.

    Raises UsageError for a mistake on the command line.
    """
    try:
        resolved = load()
    except ConfigError as error:
        return Subject(mistake=error)
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        resolved = resolved._replace(spec=dataclasses.replace(spec, module=STAND_IN))
    try:
        prepared = prepare(resolved, is_again=True)  # its notes are not printed
    except UsageError as error:
        return Subject(resolved=resolved, mistake=error)
    return Subject(resolved=resolved, prepared=prepared)


# The checks that need the job


def _files(job: Subject) -> Finding:
    if job.resolved is None and (error := job.mistake):
        text = ": ".join(filter(None, (error.where, describe(error))))
        return fail("config.files", text, "; ".join(error.hints) or "clusterrun config validate")
    resolved = job.resolved
    if resolved and resolved.notes:
        return note("config.files", "; ".join(resolved.notes), "clusterrun config validate")
    read = ", ".join(resolved.files) if resolved else ""
    return ok("config.files", f"read: {read}" if read else "no configuration file here")


def _job(job: Subject) -> Finding:
    if job.resolved is None:
        raise UnknownError("the configuration cannot be read")
    problem = job.mistake
    if problem is None and (facts := job.ready.facts):
        of_python = interpreter_problem(job.resolved.spec, facts, job.ready.plan.strategy)
        problem = None if of_python else job.ready.problem
    if problem:
        text = ": ".join(filter(None, (problem.where, describe(problem))))
        return fail("config.job", text, "; ".join(problem.hints) or "clusterrun render --help")
    plan = job.ready.plan
    where = (
        f", on this machine ({plan.device.value})" if plan.cluster.scheduler.is_this_machine else ""
    )
    where = f", on {count(len(plan.hosts), 'host')}" if plan.hosts else where
    ranks = f"{plan.nodes} x {plan.procs_per_node} ranks"
    return ok("config.job", f"{ranks}, {plan.strategy.value}{where}")


def _left_over(_: Subject) -> Finding:
    name, kept = "env.left_over", scrubbed(os.environ)
    found = [each for each in sorted(os.environ) if each not in kept or each == "NCCL_TIMEOUT"]
    if not found:
        return ok(name, "no variables of another job or launcher are set")
    text = f"set in your shell: {', '.join(found)}; submit removes them or reads them as options"
    return note(name, text, f"unset {' '.join(found)}, or use a new shell")


def _package(name: str, job: Subject, source: str = "") -> Finding:
    return python.package(job.wanted, name, needed_by="every job", source=source)


def _torch(job: Subject) -> Finding:
    found = _package("torch", job)
    if found.severity is Severity.OK and job.cuda == "" and job.ready.plan.device is Device.CUDA:
        text = f"{found.text} was built without CUDA; the job requests GPUs"
        hint = "install a torch with CUDA: pytorch.org/get-started; or train on CPUs: --device cpu"
        return bad(found.id, text, hint, is_sure=job.wanted.is_sure)
    return found


def _deepspeed(job: Subject) -> Finding:
    strategy = job.ready.plan.strategy
    needed_by = f"strategy {strategy.value}" if strategy.is_deepspeed else ""
    return python.package(job.wanted, "deepspeed", needed_by=needed_by)


def _ninja(job: Subject) -> Finding:
    _operators(job)
    return python.ninja(job.wanted)


def _operators(job: Subject) -> dict[str, str]:
    """Return the job's variables. Raises UnknownError if it builds no operators, or elsewhere."""
    if not job.builds_operators:
        strategy = job.ready.plan.strategy.value
        raise UnknownError(f"strategy {strategy} builds no operators of DeepSpeed")
    job.refuse_container()
    return _environ(job)


def _environ(job: Subject) -> dict[str, str]:
    return {**os.environ, **job.ready.resolved.spec.env}


def _toolkit(job: Subject) -> Finding:
    builds = job.builds_operators and job.ready.plan.device is Device.CUDA
    job.refuse_container()
    return cuda.toolkit(
        job.cuda, _environ(job), builds_operators=builds, is_sure=job.has_own_programs
    )


def _quick(name: str, job: Subject) -> Finding:
    of_gpus = name.startswith("gpu.")
    if of_gpus or name.startswith("path.") or name in own_checks():
        _ = job.ready  # knows the directory of the runs, and the device
    is_of_nodes = name in ("node.memory", "gpu.count")
    if is_of_nodes and not (answer := job.ready.plan.cluster.scheduler.is_this_machine):
        raise UnknownError(answer)
    return all_looks(job.needs, job.gpus if of_gpus else None)[name]()


def _submit(job: Subject) -> Finding:
    job.refuse_other_cluster()
    if shell.find("sbatch") is None:
        raise UnknownError("sbatch was not found")
    try:
        answer = check(job.ready._replace(problem=None))
    except SchedulerUnreachableError:
        raise
    except ClusterrunError as error:
        hint = "; ".join(error.hints) or "print the script: clusterrun render"
        return fail("slurm.submit", describe(error), hint)
    expected = _EXPECTED.match(answer)
    when = f"; it expects a start at {expected[1]} on {expected[2]}" if expected else ""
    return ok("slurm.submit", f"sbatch accepts the job{when}")


def _of_machine(names: str) -> dict[str, Probe]:
    return {name: partial(_quick, name) for name in names.split()}


_LOOKS: Final[dict[str, Probe]] = {
    "config.files": _files,
    "config.job": _job,
    "env.left_over": _left_over,
    "python.version": lambda job: python.version(job.wanted),
    "python.clusterrun": partial(_package, "clusterrun", source=_CLONE),
    "python.torch": _torch,
    "python.accelerate": partial(_package, "accelerate"),
    "python.deepspeed": _deepspeed,
    "python.compiler": lambda job: python.compiler(_operators(job), is_sure=job.has_own_programs),
    "python.ninja": _ninja,
    "cuda.driver": lambda job: cuda.driver(job.cuda, job.gpus or GpuAnswer(within_s=LONG_S)),
    "cuda.toolkit": _toolkit,
    **_of_machine("gpu.count gpu.ecc gpu.throttle gpu.foreign gpu.xid gpu.links"),
    "path.runs": lambda job: paths.runs(
        job.runs, is_shared=bool(job.ready.plan.cluster.scheduler.shares_files)
    ),
    "path.disk": partial(_quick, "path.disk"),
    "path.inodes": partial(_quick, "path.inodes"),
    **_of_machine("node.shm node.memory node.files node.memlock node.processes node.tmp"),
    **_of_machine("net.interface net.ports net.name"),
    "slurm.controller": lambda job: job.controller,
    "slurm.partition": lambda job: slurm.partition(job.site),
    "slurm.nodes": lambda job: slurm.nodes(job.site),
    "slurm.limits": lambda job: slurm.limits(job.site),
    "slurm.submit": _submit,
}


def probes() -> dict[str, Probe]:
    """Return all checks by id, those with a file of their own last."""
    return {**_LOOKS, **_of_machine(" ".join(own_checks()))}


def places(name: str) -> Iterator[str]:
    """Yield where a check runs, in words."""
    needs = Needs(runs=Path(), gpus=())
    is_here = name in probes()
    if is_here:
        is_guess = name.startswith(_OF_THIS_MACHINE)
        but = "; if the job runs on Slurm, a failure here is a note" if is_guess else ""
        yield f"this machine: clusterrun doctor{but}"
    if not is_here or name in all_looks(needs):
        yield "the nodes: clusterrun doctor --nodes N"
    if name in quick_looks(needs):
        yield "the nodes of each job, before the ranks start and after a failure: the preflight"


def chosen(only: Sequence[str], without: Sequence[str]) -> dict[str, Probe]:
    """Return the checks whose id begins with one of `only`, and with none of `without`."""
    for prefix in (*only, *without):
        if not any(name.startswith(prefix) for name in pages()):
            hint = "list them with: clusterrun explain all"
            raise UsageError(f"no check begins with '{prefix}'", hint=hint)
    return {name: each for name, each in probes().items() if is_chosen(name, only, without)}


def is_chosen(name: str, only: Sequence[str], without: Sequence[str]) -> bool:
    """Return whether an id begins with one of `only`, if there are any, and none of `without`."""
    return name.startswith(tuple(only) or "") and not name.startswith(tuple(without))


def examine(job: Subject, probes: Mapping[str, Probe]) -> list[Finding]:
    """Run checks of a job."""
    looks: dict[str, Look] = {name: partial(probe, job) for name, probe in probes.items()}
    late = {"path.runs": paths.slow(job.runs)} if job.prepared else {}
    found = side_by_side(looks, DEADLINE_S, alone=ALONE, late=late)
    if job.prepared is None or job.prepared.plan.cluster.scheduler.is_this_machine:
        return found
    return [  # the job runs on other machines: what would fail here may not fail there
        dataclasses.replace(each, severity=Severity.NOTE)
        if each.severity is Severity.FAIL and each.id.startswith(_OF_THIS_MACHINE)
        else each
        for each in found
    ]
