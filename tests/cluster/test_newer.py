"""The newer Slurm runs beside the system's, from a folder; the command line of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import __main__ as program
from tests.cluster.cluster import Cluster
from tests.cluster.newer import VERSION
from tests.namespaces import run

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
