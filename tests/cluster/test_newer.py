"""The newer Slurm runs beside the system's, from a folder, and is looked for before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.commands import ClusterError, run
from tests.cluster.newer import VERSION, NewerSlurm

ROOT = Path(__file__).parents[2]


@pytest.mark.slurm
def test_commands_and_jobs_of_the_newer_cluster_use_the_newer_slurm(newer_cluster: Cluster) -> None:
    assert f" {VERSION}." in run(["scontrol", "--version"]).stdout
    asked = ["srun", "-N2", "--gpus-per-node=4", "sh", "-c", "scontrol --version; hostname"]
    lines = newer_cluster.run(asked).stdout.splitlines()
    assert set(newer_cluster.nodes[:2]) < set(lines)
    assert len([line for line in lines if f" {VERSION}." in line]) == 2
    controller = newer_cluster.run(["scontrol", "show", "config"]).stdout
    assert f"SLURM_VERSION           = {VERSION}." in controller


@pytest.mark.slurm
def test_the_newer_slurm_keeps_accounts(newer_cluster: Cluster) -> None:
    job_id = newer_cluster.sbatch("-o", "/dev/null", "--wrap=exit 3")
    assert newer_cluster.wait_job(job_id) == "FAILED"


@pytest.mark.slurm
def test_a_cluster_of_the_newer_slurm_is_found_again(newer_cluster: Cluster) -> None:
    assert Cluster.running(newer_cluster.shape.state_dir) == newer_cluster


@pytest.mark.slurm
def test_what_is_installed_is_not_downloaded_again(
    newer_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get there
    assert newer_cluster.shape.newer is not None
    assert newer_cluster.shape.newer.install() is False


def test_another_distribution_gives_a_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\necho http://archive.example.org/ubuntu Ubuntu Ubuntu main\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(apt.parent), prepend=":")
    newer = NewerSlurm(prefix=tmp_path / "cache" / "slurm")
    with pytest.raises(ClusterError, match="no mirror of Debian"):
        newer.install()
    assert [path.name for path in newer.prefix.parent.iterdir()] == ["slurm.lock"]
