"""Start a job: write its run directory, pass it to the backend, record its id."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.backends import select
from clusterrun.backends.base import Backend
from clusterrun.config.choices import OnInterrupt
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir import create
from clusterrun.rundir import record as records
from clusterrun.rundir.known_roots import remember_home, remember_root
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.job_id import JobId
from clusterrun.verbs.bundle import note_passed
from clusterrun.verbs.render import Prepared, Wanted, prepare

if TYPE_CHECKING:
    from clusterrun.verbs.job import Job


def submit(job: Wanted, *, argv: Sequence[str] = (), chain: int = 0) -> Job:
    """Start a job and return its handle.

    `argv` is the command to record; `chain` is the number of jobs that take turns at the run.
    Raises UsageError if the job cannot run, SubmissionError if the scheduler refuses,
    SchedulerUnreachableError if it does not answer; then no run directory is left, unless the job
    may be in the queue.
    """
    from clusterrun.verbs.job import Job  # imports submitit, which most commands never need

    prepared = prepare(job)
    return Job(submit_prepared(prepared, argv=argv, chain=chain))


def submit_prepared(
    prepared: Prepared,
    *,
    argv: Sequence[str] = (),
    chain: int = 0,
    is_shared: bool = False,
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
    try:  # before the job exists: it may start before its id is known here
        records.write(records.new_record(plan, paths, argv=argv, now=time.time()))
    except BaseException as error:
        create.remove_run(paths)
        if isinstance(error, OSError):
            raise ClusterrunError(f"cannot write {paths.record}", cause=str(error)) from error
        raise
    new = select.submit_or_remove(scheduler, plan, paths)
    record = remember(
        paths,
        new.job_id,
        lambda now: records.submitted_as(now, new.job_id, new.slurm_cluster, new.home),
    )
    return _chain(scheduler, plan, record, chain) if chain else record


def remember(paths: RunPaths, job_id: JobId, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Record a job that was submitted. Raises ClusterrunError that names the run directory."""
    try:
        record = records.update(paths, change)
        records.link_job(record.runs_dir, job_id, paths)
        note_passed(paths)
    except (OSError, ClusterrunError) as error:
        raise ClusterrunError(
            f"job {job_id} was submitted, but its record could not be written",
            cause=str(error),
            hint=f"its run directory is {paths.root}",
        ) from error
    remember_root(record.runs_dir)
    with contextlib.suppress(OSError, ClusterrunError):  # a home that cannot be written
        remember_home(record)
    return record


def _refuse_chain(plan: Plan) -> None:
    if not (answer := plan.cluster.scheduler.has_queue):
        text = f"a chain needs a queue: {answer}"
        raise UsageError(text, hint="submit one job: it has no time limit here")
    if plan.on_interrupt is not OnInterrupt.SUCCESSOR:
        raise UsageError(
            f"a chain and --on-interrupt {plan.on_interrupt.value} contradict each other",
            hint="use --on-interrupt successor: the next job of the chain resumes the run",
        )


def _chain(scheduler: Backend, plan: Plan, record: JobRecord, length: int) -> JobRecord:
    """Submit the later jobs of a chain, each after the one before; all of them or none."""
    ids = list(record.job_ids)
    paths = record.paths
    try:
        record = remember(paths, ids[0], lambda now: dataclasses.replace(now, chain_length=length))
        while len(ids) < length:
            new = scheduler.submit_again(plan, record, after=ids[-1], chained=True)
            ids.append(new.job_id)
            record = remember(paths, ids[-1], lambda now: records.chained_by(now, ids[-1]))
    except BaseException:
        with contextlib.suppress(ClusterrunError):
            scheduler.cancel(ids)
        raise
    return record
