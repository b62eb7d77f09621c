"""The verbs: what `import clusterrun` gives, and all that the command line does."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from clusterrun.backends import select
from clusterrun.backends.base import Backend
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.machine_facts import gather_facts, working_directory
from clusterrun.backends.slurm import query, refusal
from clusterrun.backends.status import JobStatus as JobStatus
from clusterrun.backends.status import statuses
from clusterrun.config import Resolved as Resolved
from clusterrun.config import adopt_spec
from clusterrun.config import load_spec as load
from clusterrun.config.files import PROJECT_FILE, user_and_site
from clusterrun.config.spec import Cluster, JobSpec, OnInterrupt
from clusterrun.errors import ClusterrunError, Exit, JobNotFoundError, UsageError
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.logformat.lines import LogLine as LogLine
from clusterrun.rendering.bundle import Bundle, render_bundle
from clusterrun.rundir import create
from clusterrun.rundir import record as records
from clusterrun.rundir.known_roots import remember_root, remembered_roots
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord as JobRecord
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from clusterrun.verbs.release import Release

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job

    Which: TypeAlias = str | JobRecord | Job
    """How a job is named."""

Wanted = JobSpec | Resolved
"""What can be submitted: a spec as it stands, or one that was loaded with its origins."""

POLL_S: Final = 0.5  # looks at files only; a scheduler is asked every 10 s at most
POLL_MOST_S: Final = 5.0  # between two looks at a job that stays as it is
POLL_GROWTH: Final = 1.1
FORGOTTEN_S: Final = 30.0  # accounting lags behind slurmctld by seconds
PLACES_OF_ONE_MACHINE: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that is ready to go: everything decided, every file's text, and what to tell."""

    resolved: Resolved
    plan: Plan
    bundle: Bundle
    notes: tuple[str, ...] = ()


# From a spec to a job


def load_spec(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Resolved:
    """Resolve clusterrun.yaml, the environment and `flags` ({"nodes": 2}) as the command line does.

    Raises UsageError, with the place of the mistake.
    """
    return load(
        flags or {},
        environ=os.environ,
        cwd=working_directory(os.environ),
        config_file=config_file,
        profile=profile,
        overrides=overrides,
    )


def prepare(job: Wanted) -> Prepared:
    """Check what was asked, decide everything and render every file; nothing is written.

    Raises UsageError for what cannot run.
    """
    resolved = job if isinstance(job, Resolved) else _adopted(job)
    cwd = resolved.cwd
    _check_script(resolved, cwd)
    from clusterrun.advice.question import notes_of  # what asks about jobs needs none of it

    plan = make_plan(resolved.spec, gather_facts(resolved.spec, cwd=cwd, environ=os.environ))
    bundle = render_bundle(
        plan, resolved_yaml=resolved.to_yaml(), template_dirs=_template_dirs(resolved)
    )
    notes = (
        *resolved.notes,
        *_cluster_notes(resolved.spec, plan),
        *plan.notes,
        *_place_notes(plan),
    )
    notes += (*_missing_notes(plan, os.environ), *notes_of(resolved))
    return Prepared(resolved=resolved, plan=plan, bundle=bundle, notes=notes)


def _adopted(spec: JobSpec) -> Resolved:
    return adopt_spec(spec, cwd=working_directory(os.environ))


def render(job: Wanted) -> Bundle:
    """Give the text of every file that `submit` would write and send: `files["job.sbatch"]`.

    Raises UsageError for what cannot run.
    """
    return prepare(job).bundle


def submit(
    job: Wanted, *, argv: Sequence[str] = (), keep_sbatch_env: bool = False, chain: int = 0
) -> Job:
    """Start a job and return its handle.

    `argv` is what the record shall name as the command; `chain` is how many jobs shall take turns
    at the run. Raises UsageError for what cannot run, SubmissionError if the scheduler refuses,
    SchedulerUnreachableError if it is silent; no run directory is left then, unless the job may be
    in the queue.
    """
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    prepared = prepare(job)
    return Job(submit_prepared(prepared, argv=argv, keep_sbatch_env=keep_sbatch_env, chain=chain))


def submit_prepared(
    prepared: Prepared, *, argv: Sequence[str] = (), keep_sbatch_env: bool = False, chain: int = 0
) -> JobRecord:
    """Start a job that was prepared; otherwise as `submit`."""
    plan = prepared.plan
    if chain:
        _refuse_chain(plan)
    runs_dir = RunsDir(root=Path(plan.runs_dir))
    scheduler = select.backend(plan.cluster, runs_dir, keep_sbatch_env=keep_sbatch_env)
    run_id = create.new_run_id(datetime.now(), random.SystemRandom())
    paths = create.create_run(runs_dir, plan.name, run_id, prepared.bundle)
    _write_first_record(plan, paths, argv)
    new = scheduler.submit(plan, paths)
    record = remember(
        paths, new.job_id, lambda now: records.submitted_as(now, new.job_id, new.slurm_cluster)
    )
    return _chain(scheduler, plan, record, chain) if chain else record


def _refuse_chain(plan: Plan) -> None:
    if plan.cluster is not Cluster.SLURM:
        raise UsageError("a chain is for Slurm", hint="here one job may run as long as it takes")
    if plan.on_interrupt is not OnInterrupt.SUCCESSOR:
        raise UsageError(
            f"a chain and --on-interrupt {plan.on_interrupt.value} contradict each other",
            hint="the next job of the chain goes on: use --on-interrupt successor",
        )


def _chain(scheduler: Backend, plan: Plan, record: JobRecord, length: int) -> JobRecord:
    """Submit the later jobs of a chain, each behind the one before; all of them or none."""
    ids = list(record.job_ids)
    paths = record.paths
    try:
        record = remember(paths, ids[0], lambda now: dataclasses.replace(now, chain_length=length))
        while len(ids) < length:
            new = scheduler.submit_again(plan, record, after=ids[-1], chained=True)
            ids.append(new.job_id)
            record = remember(paths, ids[-1], lambda now: records.chained_by(now, ids[-1]))
            if new.held:
                raise new.held
    except BaseException:
        with contextlib.suppress(ClusterrunError):
            scheduler.cancel(ids)
        raise
    return record


def _write_first_record(plan: Plan, paths: RunPaths, argv: Sequence[str]) -> None:
    """Write job.json before the job exists: it may start before we hear of it."""
    try:
        records.write(records.new_record(plan, paths, argv=argv, now=time.time()))
    except OSError as error:
        create.remove_run(paths)
        raise ClusterrunError(f"cannot write {paths.record}", cause=str(error)) from error
    except BaseException:
        create.remove_run(paths)
        raise


def remember(paths: RunPaths, job_id: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Write down a job that was submitted. Raises ClusterrunError, with where the run is."""
    try:
        record = records.update(paths, change)
        records.link_job(record.runs_dir, job_id, paths)
    except (OSError, ClusterrunError) as error:
        raise ClusterrunError(
            f"job {job_id} was submitted, but its record could not be written",
            cause=str(error),
            hint=f"its run directory is {paths.root}",
        ) from error
    remember_root(record.runs_dir)
    return record


def check(prepared: Prepared, *, keep_sbatch_env: bool = False) -> str:
    """Let bash, and Slurm where the job is for it, look at the script; give what Slurm says.

    Nothing is submitted; "" where there is no Slurm to ask. Raises ClusterrunError where bash
    finds a mistake, SubmissionError with exit code 3 where Slurm would never run it.
    """
    script = prepared.bundle.script
    bash = shell.run(["bash", "-n"], input=script, tries=1)
    if bash.rc != 0:
        raise ClusterrunError("bash finds a mistake in the script", cause=bash.stderr.strip())
    if prepared.plan.cluster is not Cluster.SLURM:
        return ""
    select.refuse_missing_slurm()
    environ = scrubbed(os.environ, keep=prepared.plan.pass_env, keep_sbatch=keep_sbatch_env)
    slurm = shell.run(["sbatch", "--test-only"], input=script, env=environ)
    if slurm.rc != 0:
        error = refusal.explained(slurm, prepared.plan)
        error.exit_code = Exit.NO
        raise error
    return slurm.stderr.strip().removeprefix("sbatch: ")


# What is checked before anything is made


def _check_script(resolved: Resolved, cwd: Path) -> None:
    """Hold a typo against the disk now: in the queue it would cost hours."""
    script = resolved.spec.script
    if script is None:
        return
    path = cwd / script
    where = resolved.origins["script"].where
    try:
        with path.open("rb"):
            return
    except FileNotFoundError as error:
        raise UsageError(f"no script '{script}'", hint=_nearest(path), where=where) from error
    except OSError as error:
        raise UsageError(
            f"cannot read the script '{script}'", cause=error.strerror, where=where
        ) from error


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        return f"there is no directory {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean '{near[0]}'" if near else f"it is not in {path.parent}"


def _template_dirs(resolved: Resolved) -> list[Path]:
    """List where templates may stand that win over ours: project's, user's, site's."""
    files = [path for path, _ in user_and_site(os.environ)]
    if (resolved.project_dir / PROJECT_FILE).is_file():
        files.insert(0, resolved.project_dir / PROJECT_FILE)
    places = [file.parent / "templates" for file in files]
    return [place for place in places if place.is_dir()]


def _cluster_notes(spec: JobSpec, plan: Plan) -> list[str]:
    if spec.cluster is not Cluster.AUTO or plan.cluster is not Cluster.LOCAL:
        return []
    return ["sbatch was not found: the job runs on this machine (--cluster local)"]


def _missing_notes(plan: Plan, environ: Mapping[str, str]) -> tuple[str, ...]:
    missing = [name for name in plan.pass_env if name not in environ]
    return tuple(f"{name} is to be passed on (--pass-env) but is not set here" for name in missing)


def _place_notes(plan: Plan) -> list[str]:
    real = os.path.realpath(plan.runs_dir)
    inside = [place for place in PLACES_OF_ONE_MACHINE if real.startswith(place + "/")]
    if plan.cluster is not Cluster.SLURM or not inside:
        return []
    return [f"{plan.runs_dir} is on this machine alone as a rule; nodes must share it (--run-dir)"]


# Jobs that were submitted


def find_record(job: Which | None = None) -> JobRecord:
    """Find a run by job id, SLUID, name, run id or a path in it; None is this project's newest.

    Raises JobNotFoundError.
    """
    if job is None or isinstance(job, str):
        return _named(job)
    return job if isinstance(job, JobRecord) else _record_of(job)


def _named(job: str | None) -> JobRecord:
    places = places_of_runs()
    try:
        return records.resolve_job(job, places)
    except JobNotFoundError:
        number = query.job_of_sluid(job or "")
        if not number:
            raise
        return records.resolve_job(number, places)


def _record_of(handle: Job) -> JobRecord:
    record: JobRecord = handle.record
    return record


def places_of_runs() -> list[RunsDir]:
    """List where to look for runs: this project's directory, then all that were used before."""
    cwd = working_directory(os.environ)
    try:
        run_dir = load_spec().spec.run_dir
    except UsageError:  # a job must be found while its configuration is being edited
        run_dir = JobSpec().run_dir
    own = RunsDir(root=Path(os.path.normpath(cwd / run_dir)))
    real = own.root.resolve()
    return [own, *(p for p in remembered_roots() if p.root.resolve() != real)]


def status(job: Which | None = None, *, max_age_s: float | None = None) -> JobStatus:
    """Say how a job stands; answers of a scheduler up to `max_age_s` old will do.

    Raises JobNotFoundError. A scheduler that is silent is told in the status' `error`.
    """
    record = records.read_again(find_record(job))
    (found,) = statuses([record], select.backend_of, max_age_s=max_age_s)
    return found


def list_jobs(*, limit: int | None = None) -> list[JobStatus]:
    """Say how the runs of this project stand, newest first; outside of any project, of all.

    `limit` counts runs, from the newest.
    """
    places = places_of_runs()
    found = records.list_records(places[0])
    if not found:
        known = [record for place in places[1:] for record in records.list_records(place)]
        found = sorted(known, key=lambda record: record.submitted_at, reverse=True)
    return statuses(found[:limit], select.backend_of)


def wait(
    job: Which | None = None,
    *,
    timeout_s: float | None = None,
    released: Callable[[JobStatus], None] = lambda _: None,
) -> JobStatus:
    """Wait until a job has ended and return its last status.

    A job that Slurm requeued and holds back is started now; `released` is called then. A job that
    nobody knows any more has the state UNKNOWN at last. Raises JobNotFoundError, and TimeoutError
    after `timeout_s`.
    """
    record = find_record(job)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    known_at = time.monotonic()
    release = Release()
    pause_s, state = POLL_S, None
    while True:
        seen = status(record)
        if seen.error or seen.state is not JobState.UNKNOWN:
            known_at = time.monotonic()
        if seen.state.is_terminal and not seen.state.is_success:
            seen = status(record, max_age_s=0)  # it may be starting again
        if release(seen):
            released(seen)
        if seen.state.is_terminal or time.monotonic() - known_at > FORGOTTEN_S:
            return seen
        if time.monotonic() >= deadline:
            raise TimeoutError(f"job {record.job_id} is {seen.state.value} after {timeout_s} s")
        pause_s = min(POLL_MOST_S, pause_s * POLL_GROWTH) if seen.state is state else POLL_S
        state = seen.state
        time.sleep(pause_s)


def read_logs(
    job: Which | None = None,
    *,
    ranks: Collection[int] | None = None,
    nodes: Collection[str] | None = None,
    tail: int | None = None,
    attempt: int | None = None,
    errors: bool = False,
) -> Iterator[LogLine]:
    """Yield the log lines of a run, of all nodes merged by time; of its newest attempt.

    `ranks` None means all, with the launcher's and the agents' lines; `errors` chooses lines that
    tell of an error. Lines of stream GAP count bytes that were lost. Raises JobNotFoundError.
    """
    from clusterrun.logs.files import find_files
    from clusterrun.logs.merge import merge_sources
    from clusterrun.logs.newest import find_newest
    from clusterrun.logs.query import Query
    from clusterrun.logs.sources import sources_of

    paths = find_record(job).paths
    number = paths.newest_attempt() if attempt is None else attempt
    files = find_files(paths, number, None if nodes is None else frozenset(nodes))
    query = Query(ranks=None if ranks is None else frozenset(ranks), errors=errors)
    chosen = sources_of(files, query)
    return merge_sources(chosen) if tail is None else iter(find_newest(chosen, tail).lines)
