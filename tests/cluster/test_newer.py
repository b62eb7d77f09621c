"""The newer Slurm runs beside the system's, from a folder; the command line of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import __main__ as program
from tests.cluster.cluster import Cluster
from tests.cluster.newer import VERSION, NewerSlurm
from tests.namespaces import ClusterError, run

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


def test_what_up_prints_can_be_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cluster, "up", lambda _: False)
    monkeypatch.setattr(program, "_need_root", lambda: None)
    monkeypatch.setattr("sys.argv", ["tests.cluster", "up", "--slot", "99"])
    assert program.main() == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == program.NEXT
    for line in ('eval "$1"', "eval $1"):
        done = run(["bash", "-c", f'{line}; echo "$SLURM_CONF"', "bash", told])
        assert done.stderr == ""
        assert done.stdout.endswith("-99/slurm.conf\n")
