"""Plan a job, render its files, and check them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from clusterrun.backends import interpreters, select
from clusterrun.backends.environment import scrubbed, working_directory
from clusterrun.backends.machine_facts import gather_facts
from clusterrun.backends.script import read_script, syntax_problem
from clusterrun.config.choices import Cluster, Device, Strategy
from clusterrun.config.files import PROJECT_FILE, user_and_site
from clusterrun.config.load import adopt_spec
from clusterrun.config.settings import BUILT_IN, Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.inputs import interpreter_problem, is_certain
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan, Precision
from clusterrun.rendering.bundle import Bundle, render_bundle
from clusterrun.rundir.paths import PLACES_OF_ONE_MACHINE
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding
from clusterrun.verbs.check import find_pitfalls

Wanted = JobSpec | Resolved
"""A job to submit: a spec, or one that was loaded with its origins."""


class Prepared(NamedTuple):
    """A job that is ready to be submitted: the plan, the text of every file, and notes.

    `pitfalls` are those of its script. `problem` is why it would fail with its interpreter: it can
    only be rendered, for use elsewhere. `python` may be run here: it is the job's interpreter, or
    this one. `facts` are those that the plan was made from.
    """

    resolved: Resolved
    plan: Plan
    bundle: Bundle
    facts: Facts | None = None
    python: str = sys.executable
    notes: tuple[str, ...] = ()
    pitfalls: tuple[Finding, ...] = ()
    problem: UsageError | None = None

    def refuse_problem(self) -> None:
        """Refuse what can't run. Raises UsageError."""
        if self.problem is not None:
            raise self.problem


def render(job: Wanted) -> Bundle:
    """Return the text of every file that `submit` would write and send: `files["job.sbatch"]`.

    Raises UsageError if the job cannot run.
    """
    return prepare(job).bundle


def prepare(job: Wanted, *, is_again: bool = False) -> Prepared:
    """Check a spec, decide everything and render every file. Raises UsageError if it cannot run.

    `is_again`: a run had this configuration, and its notes were printed then.
    """
    if isinstance(job, JobSpec):
        job = adopt_spec(job, cwd=working_directory(os.environ))
    source = read_script(job)
    may_run = interpreters.may_run(job)
    facts = gather_facts(job.spec, cwd=job.cwd, environ=os.environ, may_run=may_run)
    host_bytes, estimates = 0, tuple[str, ...]()
    if job.spec.names_model:
        from clusterrun.advice.question import estimated  # slow to import

        host_bytes, estimates = estimated(job)
    plan = dataclasses.replace(make_plan(job.spec, facts), host_bytes=host_bytes)
    # Those of the project override those of the user and the site, and these ours.
    files = [path for path, _ in user_and_site(os.environ)]
    if (job.project_dir / PROJECT_FILE).is_file():
        files.insert(0, job.project_dir / PROJECT_FILE)
    bundle = render_bundle(
        plan,
        resolved_yaml=job.to_yaml(),
        template_dirs=[d for d in (file.parent / "templates" for file in files) if d.is_dir()],
    )
    notes = (*job.notes, *_notes(job, plan, is_again=is_again), *estimates)
    problem, is_sure = _problem(job, facts, plan.strategy, source)
    if problem and not is_sure:
        notes += (f"{problem.message}; {problem.hint}",)
        problem = None
    return Prepared(
        resolved=job,
        plan=plan,
        bundle=bundle,
        facts=facts,
        python=(facts.interpreter.path if may_run else "") or sys.executable,
        notes=notes,
        pitfalls=() if is_again else find_pitfalls(job, plan, source),
        problem=problem,
    )


def _problem(
    job: Resolved, facts: Facts, strategy: Strategy, source: bytes | None
) -> tuple[UsageError | None, bool]:
    """Return why the job would fail on the nodes, and whether that is certain."""
    if problem := interpreter_problem(job.spec, facts, strategy):
        return problem, is_certain(job.spec, facts)
    if source is None:
        return None, True
    return syntax_problem(job, source, facts.interpreter), facts.interpreter.version is not None


def check(prepared: Prepared) -> str:
    """Check the script with bash and, for a Slurm job, with sbatch; return Slurm's answer, or "".

    Nothing is submitted. Raises ClusterrunError if bash finds a mistake, SubmissionError with
    exit code 3 if Slurm would never run the job, UsageError if its interpreter can't.
    """
    prepared.refuse_problem()
    script = prepared.bundle.script
    bash = shell.run(["bash", "-n"], input=script, tries=1)
    if bash.rc != 0:
        raise ClusterrunError("bash finds an error in the script", cause=bash.stderr.strip())
    if not prepared.plan.cluster.scheduler.reads_sbatch:
        return ""
    select.refuse_missing_slurm()
    environ = scrubbed(os.environ, keep=prepared.plan.pass_env)
    slurm = shell.run(["sbatch", "--test-only"], input=script, env=environ)
    if slurm.rc != 0:
        from clusterrun.backends.slurm import site  # slow to import

        error = site.refused(slurm, prepared.plan)
        error.exit_code = Exit.NO
        raise error
    return slurm.stderr.strip().removeprefix("sbatch: ")


def check_without_slurm(resolved: Resolved) -> None:
    """Check a job as `submit` does, for Slurm if its cluster is auto. Raises UsageError."""
    spec = resolved.spec
    if spec.cluster is Cluster.AUTO:
        spec = dataclasses.replace(spec, cluster=Cluster.SLURM)
    prepare(resolved._replace(spec=spec)).refuse_problem()


def _notes(job: Resolved, plan: Plan, *, is_again: bool) -> Iterator[str]:
    spec = job.spec
    is_asked = job.origins["launch.strategy"] != BUILT_IN
    if is_asked and plan.strategy is not spec.strategy is Strategy.DDP:
        yield f"--strategy ddp has no effect: your own file sets {plan.strategy.value}"
    if spec.cluster is Cluster.AUTO and plan.cluster.scheduler.is_this_machine:
        yield "sbatch was not found: the job runs on this machine (--cluster local)"
    yield from plan.notes
    if plan.precision is Precision.BF16 and plan.device is Device.CUDA:
        from clusterrun.estimates.gpus import lacks_bf16  # slow to import

        yield from filter(None, [lacks_bf16(spec.gpu_type or spec.gpu)])
    if not is_again:
        yield from _notes_on_places(plan)
    for name in plan.pass_env:
        if name not in os.environ:
            yield f"--pass-env {name}: the variable is not set here"


def _notes_on_places(plan: Plan) -> Iterator[str]:
    """Yield a note if the nodes probably don't see the runs, the script or the interpreter.

    It may wait for a file system.
    """
    places = tuple(f"{place}/" for place in PLACES_OF_ONE_MACHINE)
    python = os.path.dirname(plan.python)  # the file itself is a link in a virtual environment
    where = {
        plan.runs_dir: "pass a --run-dir that all nodes share",
        plan.workdir: "submit from a directory that all nodes share",
        python: "name an interpreter that all nodes share (--python)",
    }
    for path, fix in where.items() if plan.cluster.scheduler.shares_files else ():
        if path and f"{os.path.realpath(path)}/".startswith(places):
            yield f"{path} is probably on a local disk of this machine; {fix}"
            return
