"""Parallel sizes in real training on CPUs: torch's own mesh, and Ulysses with DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.local.test_main_road_local import FOUR
from tests.road import Project, project

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    made = project(tmp_path / "project", tmp_path / "state")
    made.extra |= {"HF_HUB_OFFLINE": "1"}
    return made


def test_a_mesh_of_the_scripts_own_gets_the_size_that_was_asked_for(here: Project) -> None:
    done = here.cli(
        "submit", "--wait", *FOUR, "--set", "launch.tensor_parallel=4", "mesh.py", timeout_s=500
    )
    assert done.returncode == 0, done.stderr
    assert "a script with its own device mesh runs" in done.stderr
    losses = re.findall(r"rank [0-3] of tensor 4 loss ([0-9.]+)", here.logs("L1"))
    assert len(losses) == 4
    assert len(set(losses)) == 1  # the ranks share one model and its samples


def test_ulysses_splits_samples_and_its_batch_is_the_one_that_was_told(here: Project) -> None:
    argv = ("--strategy", "zero3", "--set", "launch.sequence_parallel=2", "ulysses.py")
    (here.path / "clusterrun.yaml").write_text("training: {micro_batch: 2}\n")
    done = here.cli("submit", "--wait", *FOUR, *argv, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert "  parallel   shard 2 x sequence 2; 2 data-parallel ranks\n" in done.stderr
    found = re.findall(r"rank (\d) batch (\d+) steps (\d+) of (\d+) tokens", here.logs("L1"))
    # 16 samples of 16 tokens: micro-batches of 2 in 2 data-parallel ranks, halves of each sample.
    assert sorted(found) == [(str(rank), "4", "4", "8") for rank in range(4)]
    assert here.json("status", "L1")["engine"] == "deepspeed"
