"""What is planned reaches the ranks, and what was told of a run is held beside what it took."""

from __future__ import annotations

import json

import pytest

from tests.road import Project

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

RUN = (
    *("--cluster", "local", "--nodes", "2", "--nproc-per-node", "1", "--device", "cpu"),
    *("--set", "launch.threads_per_process=1"),
)
PLANNED = ("planned=true", "micro_batch=2", "accumulation=3")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.long)])
def test_the_ranks_train_as_was_planned(here: Project, strategy: str) -> None:
    told = [word for setting in PLANNED for word in ("--set", f"training.{setting}")]
    job_id = here.submit(*RUN, "--strategy", strategy, *told, "train_lm.py", "--max-steps", "2")
    here.ok("status", job_id, "--wait")
    assert "batch 2 x 3 accumulation x 2 ranks = 12 windows a step" in here.logs(job_id)


@pytest.mark.long
def test_a_checkpoint_and_the_memory_of_a_run_are_as_they_were_told(here: Project) -> None:
    saving = ("train_lm.py", "--max-steps", "200", "--save-every", "100")
    job_id = here.submit(*RUN, *saving)
    here.ok("status", job_id, "--wait")
    compared = json.loads(here.ok("plan", "--compare", job_id, "--json"))["compared"]
    assert compared["checkpoint"]["ratio"] == pytest.approx(1, abs=0.05)
    assert 0.4 < compared["host memory"]["ratio"] <= 1.2
    assert compared["step time"]["measured"] > 0
    table = here.ok("plan", "--compare", job_id)
    assert table.splitlines()[0].split() == ["WHAT", "ESTIMATED", "MEASURED", "RATIO"]


@pytest.mark.long
def test_a_run_that_has_told_nothing_is_not_compared(here: Project) -> None:
    (here.path / "quiet.py").write_text("import time; time.sleep(30)")
    job_id = here.submit(*RUN, "--set", "launch.world_contract=false", "quiet.py")
    refused = here.cli("plan", "--compare", job_id)
    here.cli("cancel", job_id)
    assert refused.returncode == 1
    assert f"error: job {job_id} has no measurements yet" in refused.stderr
    assert "hint: call clusterrun.runtime.step in the script to measure steps" in refused.stderr
