"""Start a job: write its run directory, pass it to the backend, record its id."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterrun.backends import select
from clusterrun.backends.base import Backend
from clusterrun.config.choices import OnInterrupt
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir import create
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord, remember_home, remember_root, state_dir
from clusterrun.shared import files
from clusterrun.shared.state import JobId
from clusterrun.verbs.render import Prepared, Wanted, prepare

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job


def submit(job: Wanted, *, argv: Sequence[str] = (), chain: int = 0) -> Job:
    """Start a job and return its handle.

    `argv` is the command to record; `chain` is the number of jobs to queue one after another.
    Raises UsageError if the job cannot run, SubmissionError if the scheduler refuses it, and
    SchedulerUnreachableError if the scheduler does not answer. An error leaves no run directory,
    unless the job may be in the queue.
    """
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    return Job(submit_prepared(prepare(job), argv=argv, chain=chain))


def submit_prepared(
    prepared: Prepared, *, argv: Sequence[str] = (), chain: int = 0, is_shared: bool = False
) -> JobRecord:
    """Start a job that was prepared; otherwise as `submit`.

    `is_shared`: refuse a first host that does not see the run directory, which the caller reads.
    """
    prepared.refuse_problem()
    plan = prepared.plan
    if chain:
        _refuse_chain(plan)
    runs_dir = RunsDir(root=Path(plan.runs_dir))
    scheduler = select.backend(plan.cluster, runs_dir, is_shared=is_shared)
    run_id = create.new_run_id(datetime.now(), random.SystemRandom())
    paths = create.create_run(runs_dir, plan.name, run_id, prepared.bundle)
    try:  # before the submission: the job may start before its id is known here
        records.write(records.new_record(plan, paths, argv=argv, now=time.time()))
    except BaseException as error:
        create.remove_run(paths)
        if isinstance(error, OSError):
            raise ClusterrunError(f"cannot write {paths.record}", cause=str(error)) from error
        raise
    job = select.submit_or_remove(scheduler, plan, paths)
    answer = (job.job_id, job.slurm_cluster, job.home)
    record = remember(paths, job.job_id, lambda now: records.submitted_as(now, *answer))
    return _submit_chain(scheduler, plan, record, chain) if chain else record


def remember(paths: RunPaths, job_id: JobId, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Record a job that was submitted. Raises ClusterrunError that names the run directory."""
    try:
        record = records.update(paths, change)
        records.link_job(paths, job_id)
        _append_checksums(paths)
    except (OSError, ClusterrunError) as error:
        text = f"job {job_id} was submitted, but its record could not be written"
        hint = f"the run directory is {paths.root}"
        raise ClusterrunError(text, cause=str(error), hint=hint) from error
    remember_root(record.paths.runs_dir)
    with contextlib.suppress(OSError, ClusterrunError):  # a home that cannot be written
        remember_home(record)
    return record


def _refuse_chain(plan: Plan) -> None:
    """Raise UsageError if jobs of this plan can't continue the run one after another."""
    has_queue = plan.cluster.scheduler.has_queue
    if not has_queue:  # a `Lack`: its text says why
        text = f"a chain needs a queue: {has_queue}"
        raise UsageError(text, hint="submit one job: a job has no time limit here")
    if plan.on_interrupt is not OnInterrupt.SUCCESSOR:
        text = f"a chain and --on-interrupt {plan.on_interrupt.value} contradict each other"
        hint = "use --on-interrupt successor: the next job of the chain resumes the run"
        raise UsageError(text, hint=hint)


def _submit_chain(scheduler: Backend, plan: Plan, record: JobRecord, length: int) -> JobRecord:
    """Submit the later jobs of a chain, each after the one before; all of them or none."""
    ids = list(record.job_ids)
    paths = record.paths
    try:
        record = remember(paths, ids[0], lambda now: dataclasses.replace(now, chain_length=length))
        while len(ids) < length:
            ids.append(scheduler.submit_again(plan, record, after=ids[-1], chained=True).job_id)
            record = remember(paths, ids[-1], lambda now: records.chained_by(now, ids[-1]))
    except BaseException:
        with contextlib.suppress(ClusterrunError):
            scheduler.cancel(ids)
        raise
    return record


# Values passed by name: a run keeps a checksum of each. It is made with a key that only the user's
# own state contains: without the key, no value can be found by guessing.

_KEY_BYTES: Final = 32


def passed_names(paths: RunPaths) -> list[str]:
    """Return the variables of `pass_env`."""
    names = (files.read_json(paths.plan) or {}).get("pass_env", ())
    return [name for name in names if isinstance(name, str)]


def _append_checksums(paths: RunPaths) -> None:
    """Add a line with the checksums of a job's passed variables; without it, they are unknown."""
    if names := passed_names(paths):
        with contextlib.suppress(OSError):
            lines = files.read_whole(paths.passed) if paths.passed.exists() else b""
            checksums = {name: _checksum(paths, name) for name in names}
            files.write_whole(paths.passed, lines + json.dumps(checksums).encode() + b"\n")


def unknown_names(paths: RunPaths) -> list[str]:
    """Return the variables whose value this shell lacks, or that had another in one of the jobs."""
    try:
        lines = files.read_whole(paths.passed).splitlines()
        jobs = [files.parse_object(line) or {} for line in lines]  # checksums by variable
        checksums = {name: {job.get(name) for job in jobs} for name in passed_names(paths)}
        return [name for name, known in checksums.items() if known != {_checksum(paths, name)}]
    except (OSError, TypeError):  # the file or the key can't be used
        return passed_names(paths)


def _checksum(paths: RunPaths, name: str) -> str:
    text = "\0".join((paths.root.name, name, os.environ.get(name, "")))
    return hmac.new(_key(), os.fsencode(text), "sha256").hexdigest()


def _key() -> bytes:
    """Return the user's key, made at its first use."""
    path = state_dir() / "key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if files.size_of(path) != _KEY_BYTES:  # a full disk leaves an empty key, which all can guess
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        files.create(path, secrets.token_bytes(_KEY_BYTES))
    return files.read_whole(path)
