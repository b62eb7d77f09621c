"""Check what can be known about a job before it is queued: machine, Python, network, Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from clusterrun.backends.environment import scrubbed
from clusterrun.backends.slurm import site as slurm
from clusterrun.config.choices import Cluster, Device
from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError, UsageError, describe
from clusterrun.health import paths, toolchain
from clusterrun.health.checks import pages
from clusterrun.health.examine import Look, UnknownError
from clusterrun.health.examine import examine as side_by_side
from clusterrun.health.gpus import LONG_S, GpuAnswer
from clusterrun.health.node import Needs, all_looks, quick_looks
from clusterrun.launch.facts import Interpreter
from clusterrun.launch.inputs import interpreter_problem, is_certain, runs_in_container
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, Severity, bad, fail, note, ok, skip
from clusterrun.shared.wording import count, dotted
from clusterrun.verbs.render import Prepared, check, prepare

DEADLINE_S: Final = 4.0  # a domain that a file system, a driver or Slurm blocks is left behind
STAND_IN: Final = "__hello__"  # a module that every Python has, for a job without a script
ALONE: Final = ("slurm.submit", "net.name")  # each may be slow
_OF_THIS_MACHINE: Final = ("cuda.driver", "gpu.", "node.", "net.")
_EXPECTED: Final = re.compile(r"Job \d+ to start at (\S+) using .{0,200} nodes (\S+)")


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

    @property
    def builds_operators(self) -> bool:
        """Whether DeepSpeed compiles its optimizer for the CPU when the job starts."""
        return self.plan.strategy.is_deepspeed and bool(self.plan.strategy.offload)

    @property
    def cuda(self) -> str | None:
        """The CUDA of the job's torch; "" for none, None if unknown."""
        found = self.interpreter
        return toolchain.cuda_of_torch(found.places, found.packages.get("torch", ""))

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
        return slurm.controller(self.plan)

    @property
    def queued(self) -> Plan:
        """The plan, for a Slurm that answers. Raises UnknownError if it does not."""
        if self.controller.severity is Severity.FAIL:
            raise UnknownError("slurmctld does not answer")
        return self.plan

    def refuse_other_cluster(self) -> None:
        """Raise UnknownError if the job does not run on Slurm."""
        if not (answer := self.plan.cluster.scheduler.reads_sbatch):
            is_asked = self.spec.cluster is not Cluster.AUTO
            raise UnknownError(answer if is_asked else "no sbatch here")


def subject_of(resolved: Resolved) -> Subject:
    """Prepare a job as `render` does; without a script it is another one. Raises UsageError."""
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        resolved = resolved._replace(spec=dataclasses.replace(spec, module=STAND_IN))
    return Subject(prepare(resolved, is_again=True))  # its notes are not printed


# The checks that need the job


def _files(job: Subject) -> Finding:
    name, resolved = "config.files", job.prepared.resolved
    if resolved.notes:
        return note(name, "; ".join(resolved.notes), "clusterrun config validate")
    read = ", ".join(resolved.files)
    return ok(name, f"read: {read}" if read else "no configuration file here")


def _job(job: Subject) -> Finding:
    name, plan, facts = "config.job", job.plan, job.prepared.facts
    is_of_python = facts and interpreter_problem(job.spec, facts, plan.strategy)
    if (problem := job.prepared.problem) and not is_of_python:
        text = ": ".join(filter(None, (problem.where, describe(problem))))
        return fail(name, text, "; ".join(problem.hints) or "clusterrun render --help")
    where = f", on {count(len(plan.hosts), 'host')}" if plan.hosts else ""
    if plan.cluster.scheduler.is_this_machine:
        where = f", on this machine ({plan.device.value})"
    return ok(name, f"{plan.nodes} x {plan.procs_per_node} ranks, {plan.strategy.value}{where}")


def _left_over(_: Subject) -> Finding:
    name, kept = "env.left_over", scrubbed(os.environ)
    found = [each for each in sorted(os.environ) if each not in kept or each == "NCCL_TIMEOUT"]
    if not found:
        return ok(name, "no variables of another job or launcher are set")
    text = f"set in your shell: {', '.join(found)}; submit removes them or reads them as options"
    return note(name, text, f"unset {' '.join(found)}, or use a new shell")


def _packages(job: Subject) -> Finding:
    name, found, facts = "python.packages", job.python, job.prepared.facts
    if facts and (problem := interpreter_problem(job.spec, facts, job.plan.strategy)):
        return bad(name, problem.message, "; ".join(problem.hints), is_sure=job.is_sure)
    if found.version is None or not found.is_known:
        return skip(name, f"the packages of {found.path or 'the interpreter'} are unknown")
    versions = ", ".join(f"{each} {version}" for each, version in found.packages.items() if version)
    return ok(name, f"{found.path}: Python {dotted(found.version)}, {versions}")


def _torch(job: Subject) -> Finding:
    on_gpus = job.plan.device is Device.CUDA
    return toolchain.torch(job.python, job.cuda, on_gpus=on_gpus, is_sure=job.is_sure)


def _compiler(job: Subject) -> Finding:
    if not job.builds_operators:
        strategy = job.plan.strategy.value
        raise UnknownError(f"strategy {strategy} builds no operators of DeepSpeed")
    environ = {**os.environ, **job.spec.env}
    return toolchain.compiler(job.python, environ, is_sure=not job.spec.setup)


def _toolkit(job: Subject) -> Finding:
    job.refuse_container()
    builds = job.builds_operators and job.plan.device is Device.CUDA
    environ, is_sure = {**os.environ, **job.spec.env}, not job.spec.setup
    return toolchain.toolkit(job.cuda, environ, builds_operators=builds, is_sure=is_sure)


def _submit(job: Subject) -> Finding:
    job.refuse_other_cluster()
    if shell.find("sbatch") is None:
        raise UnknownError("sbatch was not found")
    try:
        answer = check(job.prepared._replace(problem=None))
    except SchedulerUnreachableError:
        raise
    except ClusterrunError as error:
        hint = "; ".join(error.hints) or "print the script: clusterrun render"
        return fail("slurm.submit", describe(error), hint)
    expected = _EXPECTED.match(answer)
    when = f"; it expects a start at {expected[1]} on {expected[2]}" if expected else ""
    return ok("slurm.submit", f"sbatch accepts the job{when}")


_OF_JOB: Final[dict[str, Callable[[Subject], Finding]]] = {
    "config.files": _files,
    "config.job": _job,
    "env.left_over": _left_over,
    "python.packages": _packages,
    "python.torch": _torch,
    "python.compiler": _compiler,
    "cuda.driver": lambda job: toolchain.driver(job.cuda, job.gpus or GpuAnswer(within_s=LONG_S)),
    "cuda.toolkit": _toolkit,
    "path.runs": lambda job: paths.runs(
        Path(job.plan.runs_dir), is_shared=bool(job.plan.cluster.scheduler.shares_files)
    ),
    "slurm.controller": lambda job: job.controller,
    "slurm.partition": lambda job: slurm.partition(job.queued),
    "slurm.nodes": lambda job: slurm.nodes(job.queued),
    "slurm.limits": lambda job: slurm.limits(job.queued),
    "slurm.submit": _submit,
}


def places(name: str) -> Iterator[str]:
    """Yield where a check runs, in words."""
    needs = Needs(runs=Path(), gpus=())
    is_of_nodes = name in all_looks(needs)
    if name in _OF_JOB or is_of_nodes:
        is_guess = name.startswith(_OF_THIS_MACHINE)
        but = "; if the job runs on Slurm, a failure here is a note" if is_guess else ""
        yield f"this machine: clusterrun doctor{but}"
    if name not in _OF_JOB or is_of_nodes:
        yield "the nodes: clusterrun doctor --nodes N"
    if name in quick_looks(needs):
        yield "the nodes of each job, before the ranks start and after a failure: the preflight"


def chosen(job: Subject, only: Sequence[str], without: Sequence[str]) -> dict[str, Look]:
    """Return the checks of this machine that are chosen, by id, in the order of their pages."""
    for prefix in (*only, *without):
        if not any(name.startswith(prefix) for name in pages()):
            hint = "list them with: clusterrun explain all"
            raise UsageError(f"no check begins with '{prefix}'", hint=hint)
    looks = all_looks(job.needs, job.gpus)
    if not (answer := job.plan.cluster.scheduler.is_this_machine):
        looks |= {name: partial(skip, name, str(answer)) for name in ("node.memory", "gpu.count")}
    looks |= {name: partial(probe, job) for name, probe in _OF_JOB.items()}
    names = (name for name in pages() if name in looks and is_chosen(name, only, without))
    return {name: looks[name] for name in names}


def is_chosen(name: str, only: Sequence[str], without: Sequence[str]) -> bool:
    """Return whether an id begins with one of `only`, if there are any, and none of `without`."""
    return name.startswith(tuple(only) or "") and not name.startswith(tuple(without))


def examine(job: Subject, looks: Mapping[str, Look]) -> list[Finding]:
    """Run checks of a job."""
    late = {"path.runs": paths.slow(Path(job.plan.runs_dir))}
    found = side_by_side(looks, DEADLINE_S, alone=ALONE, late=late)
    is_here = job.plan.cluster.scheduler.is_this_machine
    return found if is_here else noted(found, _OF_THIS_MACHINE)


def noted(found: Sequence[Finding], names: tuple[str, ...]) -> list[Finding]:
    """Turn failures of checks into notes: what would fail here may not fail where the job runs."""
    return [
        dataclasses.replace(each, severity=Severity.NOTE)
        if each.severity is Severity.FAIL and each.id.startswith(names)
        else each
        for each in found
    ]
