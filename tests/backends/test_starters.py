"""What starts a shell on the hosts of an allocation."""

from __future__ import annotations

import pytest

from clusterrun.backends.hosts import starters
from clusterrun.config.choices import Cluster, Device, Starter
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import JobSpec
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from tests.launch.samples import slurm_facts

HOSTS = ("n1", "n2", "n3")


def plan_with(starter: Starter) -> Plan:
    hosts = HostList(hosts=HOSTS, slots=(0, 0, 0), source="$SLURM_JOB_NODELIST")
    facts = slurm_facts(cluster=Cluster.ALLOCATION, hosts=hosts, starter=starter)
    return make_plan(JobSpec(script="train.py", device=Device.CPU), facts)


def command(starter: Starter) -> str:
    return " ".join(starters.host_command(plan_with(starter), 2, is_here=False))


def test_a_starter_gets_the_host_and_srun_all_that_the_allocation_has_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    done = shell.Completed(rc=0, stdout="n9,n[1,3]\n", stderr="")
    monkeypatch.setattr(shell, "run", lambda _: done)
    assert command(Starter.BLAUNCH) == "blaunch n3 bash -s"
    assert command(Starter.FLUX) == "flux exec --rank=2 --dir=/ bash -s"
    assert command(Starter.SRUN) == (
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=n3 --mem=0 --unbuffered --quiet "
        "--cpus-per-task=4 --gres=none bash -s"
    )


def test_srun_sees_its_job_and_not_the_sizes_of_its_steps() -> None:
    given = {"SLURM_JOB_ID": "1", "SLURM_GPUS": "4", "SLURM_NTASKS": "4", "RANK": "0", "HOME": "/"}
    kept = starters.starters_environ(plan_with(Starter.SRUN), given)
    assert kept == {"SLURM_JOB_ID": "1", "HOME": "/"}
