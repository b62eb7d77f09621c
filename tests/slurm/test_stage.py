"""The environment on each node's own disk (`launch.stage`), on a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.road import LIGHT, Project

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(300)]

SCRIPT = "import os, sys, weights; print('prefix', os.environ['RANK'], sys.prefix, weights.SIZE)"
FAIL_ONCE = "os.path.exists('failed') or sys.exit(open('failed', 'w').close() or 1)"
TWO = ("-N2", "--gpus-per-node", "1", "--set", "launch.stage=tar", *LIGHT)


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> Path:
    """Make a small environment, which finds the packages of this one and of a project."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (packages,) = env.glob("lib/python3*/site-packages")
    (packages / "weights.py").write_text("SIZE = 1\n")
    places = [place for place in sys.path if place.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join([*places, str(Path(__file__).parents[2])]))
    return env


@pytest.fixture(name="here")
def _here(here: Project, tmp_path: Path, env: Path) -> Project:
    (here.path / "where.py").write_text(SCRIPT)
    (tmp_path / "disk").mkdir()
    return here


def python(root: Path) -> tuple[str, str]:
    return "--python", str(root / "env" / "bin" / "python")


def run(cluster: Cluster, here: Project, *options: str) -> tuple[set[str], str]:
    """Run a job; return what its ranks print and the lines about its environment."""
    job_id = here.submit(*TWO, *options, "where.py")
    state = cluster.wait_job(job_id)
    batch = (here.run_dir(job_id) / "slurm" / "batch.out").read_text()
    assert state == "COMPLETED", batch
    words = [line.partition("prefix ")[2] for line in here.logs(job_id).splitlines()]
    return set(filter(None, words)), batch


def test_ranks_import_from_the_disk_of_their_node_and_the_next_job_finds_the_copy(
    cluster: Cluster, here: Project, tmp_path: Path
) -> None:
    disk = ("--set", f"launch.stage_dir={tmp_path / 'disk'}")
    ranks, batch = run(cluster, here, *disk, *python(tmp_path))
    (copy,) = (tmp_path / "disk").glob("clusterrun-stage-*/*")
    assert ranks == {f"0 {copy}/env 1", f"1 {copy}/env 1"}
    assert f"staged {tmp_path / 'env'} (" in batch
    assert "; 2 nodes lacked it\n" in batch
    (attempt,) = here.json("status")["attempts"]
    phases = {each["phase"]: each["seconds"] for each in attempt["startup"]["phases"]}
    assert phases["stage"] > 0
    (here.path / "where.py").write_text(f"{SCRIPT}; {FAIL_ONCE}")
    named = ("--setup", f"export PATH={tmp_path / 'env' / 'bin'}:$PATH", "--python", "python")
    again, batch = run(cluster, here, *disk, *named, "--max-restarts", "1")
    assert again == ranks, batch
    assert "attempt 1: relaunch: " in batch
    assert len(list(here.path.glob("runs/by-job/*/attempts/2"))) == 1
    assert "; 0 nodes lacked it\n" in batch
    assert "packing" not in batch
