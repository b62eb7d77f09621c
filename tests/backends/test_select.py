"""Where a job runs, and who knows a job that ran."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterrun.backends import select
from clusterrun.backends.local.backend import LocalBackend
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.config.choices import Cluster
from clusterrun.errors import UsageError
from clusterrun.rundir import record
from clusterrun.rundir.paths import RunsDir

from .builders import make_bundle, make_plan, make_run
from .conftest import Stubs


def test_slurm_without_sbatch_is_refused(stubs: Stubs, tmp_path: Path) -> None:
    runs = RunsDir(root=tmp_path)
    with pytest.raises(UsageError, match="sbatch was not found") as absent:
        select.backend(Cluster.SLURM, runs)
    assert "--cluster local" in absent.value.hints[0]
    assert select.backend(Cluster.LOCAL, runs) == LocalBackend(runs_dir=runs)
    stubs.add("sbatch")
    assert select.backend(Cluster.SLURM, runs) == SlurmBackend()


def test_jobs_of_one_scheduler_are_asked_about_together(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    here = record.new_record(plan, make_run(tmp_path, plan, make_bundle(plan)), argv=(), now=1)
    assert select.backend_of(here) == LocalBackend(runs_dir=RunsDir(root=tmp_path / "runs"))
    there = dataclasses.replace(here, cluster=Cluster.SLURM)
    assert select.backend_of(there) == select.backend_of(dataclasses.replace(there, name="other"))
    assert hash(select.backend_of(there)) == hash(SlurmBackend())
    elsewhere = dataclasses.replace(there, slurm_cluster="tuxA")
    assert select.backend_of(elsewhere) == SlurmBackend(slurm_cluster="tuxA")
