"""Batch scripts of a few lines, submitted through the Slurm backend."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.select import submit_or_remove
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.config.choices import Cluster as Place
from clusterrun.rundir import record
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobState
from tests.backends.builders import make_bundle, make_plan, make_run
from tests.cluster.cluster import Cluster
from tests.patience import wait_for

Submit = Callable[..., JobRecord]


BACKEND = SlurmBackend()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Submit:
    return submitter(tmp_path)


def submitter(root: Path) -> Submit:
    def submit(body: str, *options: str, **changes: object) -> JobRecord:
        lines = "".join(f"#SBATCH {option}\n" for option in ("--mem-per-cpu=10", *options))
        plan = make_plan(root, cluster=Place.SLURM, **changes)
        bundle = make_bundle(plan, sbatch=f"#!/bin/bash\n{lines}{body}\n")
        paths = make_run(root, plan, bundle)
        made = record.new_record(plan, paths, argv=(), now=time.time())
        made = dataclasses.replace(made, job_id=submit_or_remove(BACKEND, plan, paths).job_id)
        record.write(made)
        return made

    return submit


def ask(made: JobRecord) -> SchedulerJob:
    return BACKEND.query([made.job_id], since=made.submitted_at, max_age_s=0)[made.job_id]


def until(made: JobRecord, *states: JobState, timeout_s: float = 60) -> SchedulerJob:
    wait_for(lambda: ask(made).state in states, f"{made.job_id} in {states}", timeout_s)
    return ask(made)
