"""Configure and plan a job, render its files, and check them and its script."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterrun.backends import interpreters, select
from clusterrun.backends.environment import scrubbed, working_directory
from clusterrun.backends.machine_facts import gather_facts, read_script, syntax_problem
from clusterrun.config import load
from clusterrun.config.choices import Cluster, Device, Strategy
from clusterrun.config.files import PROJECT_FILE, user_and_site
from clusterrun.config.settings import BUILT_IN, Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.inputs import interpreter_problem, is_certain
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan, Precision
from clusterrun.linting.rule import Launch, lint
from clusterrun.rendering.bundle import Bundle, render_bundle
from clusterrun.rundir.paths import PLACES_OF_ONE_MACHINE
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding

Wanted = JobSpec | Resolved  # a job to submit: a spec, or one that was loaded with its origins


class Prepared(NamedTuple):
    """A job that is ready to be submitted."""

    resolved: Resolved
    plan: Plan
    bundle: Bundle  # the text of every file
    facts: Facts | None = None  # that the plan was made from
    notes: tuple[str, ...] = ()
    pitfalls: tuple[Finding, ...] = ()  # of its script
    problem: UsageError | None = None  # why it would fail here: it can be rendered for elsewhere

    def refuse_problem(self) -> None:
        """Refuse what can't run. Raises UsageError."""
        if self.problem is not None:
            raise self.problem


def load_spec(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Resolved:
    """Resolve clusterrun.yaml, the environment and `flags` ({"nodes": 2}).

    Raises UsageError that names the place of the mistake.
    """
    return load.load_spec(
        flags or {},
        environ=os.environ,
        cwd=working_directory(os.environ),
        config_file=config_file,
        profile=profile,
        overrides=overrides,
    )


def render(job: Wanted) -> Bundle:
    """Return the text of every file that `submit` would write and send: `files["job.sbatch"]`.

    Raises UsageError if the job cannot run.
    """
    return prepare(job).bundle


def prepare(job: Wanted, *, is_again: bool = False) -> Prepared:
    """Check a spec, decide everything and render every file. Raises UsageError if it can't.

    `problem` of the result says why the job would surely fail on the nodes; a note, why it may.
    `is_again`: a run had this configuration, and its notes were printed then.
    """
    if isinstance(job, JobSpec):
        job = load.adopt_spec(job, cwd=working_directory(os.environ))
    source = read_script(job)
    may_run = interpreters.may_run(job)
    facts = gather_facts(job.spec, cwd=job.cwd, environ=os.environ, may_run=may_run)
    host_bytes, warnings = 0, tuple[str, ...]()
    if job.spec.names_model:
        from clusterrun.advice.question import host_bytes_and_warnings  # slow to import

        host_bytes, warnings = host_bytes_and_warnings(job)
    plan = dataclasses.replace(make_plan(job.spec, facts), host_bytes=host_bytes)
    # Templates of the project override those of the user and the site, which override ours.
    config_files = [path for path, _ in user_and_site(os.environ)]
    if (job.project_dir / PROJECT_FILE).is_file():
        config_files.insert(0, job.project_dir / PROJECT_FILE)
    template_dirs = [file.parent / "templates" for file in config_files]
    template_dirs = [directory for directory in template_dirs if directory.is_dir()]
    bundle = render_bundle(plan, resolved_yaml=job.to_yaml(), template_dirs=template_dirs)
    notes = (*job.notes, *_notes(job, plan, is_again=is_again), *warnings)
    problem, is_sure = _problem(job, facts, plan.strategy, source)
    if problem and not is_sure:
        notes += (f"{problem.message}; {problem.hint}",)
        problem = None  # the job may run on the nodes
    pitfalls = () if is_again else find_pitfalls(job, plan, source)
    return Prepared(job, plan, bundle, facts, notes, pitfalls, problem)


def _problem(
    job: Resolved, facts: Facts, strategy: Strategy, source: bytes | None
) -> tuple[UsageError | None, bool]:
    """Return why the job would fail on the nodes, or None, and whether that is certain."""
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
        raise ClusterrunError("bash finds an error in the batch script", cause=bash.stderr.strip())
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


def _notes(job: Resolved, plan: Plan, *, is_again: bool) -> Iterator[str]:
    """Yield what the user may not expect of the plan."""
    spec = job.spec
    is_requested = job.origins["launch.strategy"] != BUILT_IN
    is_replaced = spec.strategy is Strategy.DDP and plan.strategy is not Strategy.DDP
    if is_requested and is_replaced:
        yield f"--strategy ddp has no effect: your own file sets {plan.strategy.value}"
    if spec.cluster is Cluster.AUTO and plan.cluster.scheduler.is_this_machine:
        yield "sbatch was not found: the job runs on this machine (--cluster local)"
    yield from plan.notes
    if plan.precision is Precision.BF16 and plan.device is Device.CUDA:
        from clusterrun.estimates.gpus import bf16_note  # slow to import

        if text := bf16_note(spec.gpu_type or spec.gpu):
            yield text
    if not is_again:
        yield from _notes_on_places(plan)
    unset = (name for name in plan.pass_env if name not in os.environ)
    yield from (f"--pass-env {name}: the variable is not set here" for name in unset)


def _notes_on_places(plan: Plan) -> Iterator[str]:
    """Yield a note if nodes probably don't see runs, script or interpreter; this may take long."""
    if not plan.cluster.scheduler.shares_files:
        return  # nothing has to be shared
    python = os.path.dirname(plan.python)  # the file itself is a link in a virtual environment
    remedies = {
        plan.runs_dir: "pass a --run-dir that all nodes share",
        plan.workdir: "submit from a directory that all nodes share",
        python: "name an interpreter that all nodes share (--python)",
    }
    for path, remedy in remedies.items():
        if path and f"{os.path.realpath(path)}/".startswith(PLACES_OF_ONE_MACHINE):
            yield f"{path} is probably on a local disk of this machine; {remedy}"
            return


def find_pitfalls(
    job: Resolved, plan: Plan, source: bytes | None, *, of_many_ranks: bool = False
) -> tuple[Finding, ...]:
    """Return the pitfalls of a launch; only those of its settings if its script is not here.

    `of_many_ranks`: if the job sets no size, look for those of two nodes with two ranks each.
    """
    spec = job.spec
    named = _deepspeed_file(plan)
    launch = Launch(
        nodes=plan.nodes,
        ranks_per_node=plan.procs_per_node,
        has_gpus=plan.device is Device.CUDA,
        is_simulated=bool(spec.cluster.scheduler.is_this_machine),
        strategy=plan.strategy.value,
        max_restarts=plan.max_restarts or 0,
        shared_port=0 if spec.exclusive else plan.main_process_port,  # 0: no job shares the nodes
        args=tuple(spec.args),
        setup=plan.setup,
        missing=(named,) if named and _is_missing(job.cwd / named) else (),
        is_missing=lambda path: _is_missing(job.cwd / path),
    )
    if of_many_ranks and is_unsized(job, plan):
        has_gpus = spec.device is not Device.CPU
        launch = launch._replace(nodes=2, ranks_per_node=2, has_gpus=has_gpus, is_sized=False)
    return lint(source or b"", launch)


def is_unsized(job: Resolved, plan: Plan) -> bool:
    """Return whether nothing sets the size of a job."""
    spec = job.spec
    sizes = (spec.nodes, spec.gpus_per_node, spec.nproc_per_node)
    is_unset = all(size is None for size in sizes)
    return is_unset and plan.nodes * plan.procs_per_node == 1  # hosts may also set it


def _deepspeed_file(plan: Plan) -> str:
    """Return the DeepSpeed JSON that an accelerate YAML names; "" if the job does not read it."""
    if not plan.accelerate_text or plan.deepspeed:
        return ""
    import yaml  # slow to import

    from clusterrun.config.document import BoundedLoader

    found = yaml.load(plan.accelerate_text, Loader=BoundedLoader)
    section = found.get("deepspeed_config") if isinstance(found, dict) else None
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    return named if isinstance(named, str) else ""


def _is_missing(path: Path) -> bool:
    """Return whether a file does not exist, and its directory, which may be on the nodes, does."""
    try:
        path.stat()
    except FileNotFoundError:
        return path.parent.is_dir()
    except (OSError, ValueError):
        pass
    return False


def place(finding: Finding, script: str) -> str:
    """Return the file and line of a finding, or that it is a setting of the job."""
    return f"{script}:{finding.line}" if finding.line else "the job's settings"
