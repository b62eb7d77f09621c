"""Save and leave, and go on, on simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.shared import checkpoint_files
from tests.chaos.training import add_scripts
from tests.local.processes import wait_for_none
from tests.road import Project, project

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

RUN = (
    *("--cluster", "local", "--nodes", "2", "--nproc-per-node", "1", "--device", "cpu"),
    *("--threads-per-process", "1", "paced.py", "--layers", "1", "--width", "32"),
    *("--heads", "2", "--seq-len", "32", "--batch-size", "2", "--log-every", "1"),
    *("--save-every", "100000", "--max-steps", "240"),
)


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    return add_scripts(project(tmp_path / "project", tmp_path / "state"))


@pytest.mark.long  # the README's tour does the same, and the test on Slurm looks closer
def test_a_training_that_was_cancelled_with_a_checkpoint_goes_on(here: Project) -> None:
    job_id = here.submit(*RUN)
    here.wait_for_line(job_id, "step 3/")
    done = here.cli("cancel", "--checkpoint", job_id)
    assert done.returncode == 0, done.stderr
    saved, _ = checkpoint_files.newest(here.run_dir(job_id) / "checkpoints")
    assert saved is not None
    assert f"checkpoint {saved.path} written after" in done.stderr
    here.ok("status", job_id, "--wait")
    assert here.json("status", job_id)["state"] == "CANCELLED"

    second = here.ok("resume", job_id, "--parsable").strip()
    assert second == "L2"
    refused = here.cli("resume", job_id)
    assert refused.returncode == 2
    assert "two writers would share the run directory" in refused.stderr
    here.ok("status", job_id, "--wait")
    status = here.json("status", second)
    assert (status["state"], status["earlier_job_ids"]) == ("COMPLETED", [job_id])
    assert here.run_dir(second) == here.run_dir(job_id)
    assert f"step {saved.step + 1}/" in here.logs(second)
    assert f"step {saved.step}/" not in here.logs(second)
    wait_for_none(here, second)
