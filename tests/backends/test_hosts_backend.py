"""How a submission ends if the first host, here this machine, does not start the controller."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest

from clusterrun.backends.hosts import backend
from clusterrun.backends.hosts.backend import HostsBackend
from clusterrun.backends.select import submit_or_remove
from clusterrun.config.choices import Cluster, Device
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError
from clusterrun.launch.make import make_plan
from clusterrun.rundir.paths import RunPaths, RunsDir
from tests.launch.samples import slurm_facts


def refusal(tmp_path: Path, setup: str) -> ClusterrunError:
    """Submit a job with this setup line; return why it is refused."""
    hosts = HostList(hosts=("localhost",), slots=(0,), source="--hosts")
    facts = slurm_facts(cluster=Cluster.SSH, hosts=hosts, workdir=str(tmp_path))
    plan = make_plan(JobSpec(script="train.py", device=Device.CPU), facts)
    paths = RunPaths(root=tmp_path / "runs" / "train" / "1")
    paths.root.mkdir(parents=True)
    paths.env_script.write_text(f"{setup}\n")
    backend = HostsBackend(runs_dir=RunsDir(root=tmp_path / "runs"))
    with pytest.raises(ClusterrunError) as refused:
        submit_or_remove(backend, dataclasses.replace(plan, setup=(setup,)), paths)
    assert not paths.root.exists()
    return refused.value


def test_a_host_whose_setup_lines_do_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MEET_S", 1.0)
    assert str(refusal(tmp_path, "sleep 1018")) == "localhost: it does not answer"
    words = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1018"] not in words
