"""Successors, chains, `resume`, `cancel --checkpoint` and a release, on a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clusterrun.rundir import record as records
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import checkpoint_files
from tests.backends.builders import SUBMIT_SUCCESSOR
from tests.chaos.training import add_scripts
from tests.cluster.cluster import Cluster
from tests.patience import wait_for
from tests.road import Project
from tests.slurm.jobs import Submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.usefixtures("own_memory", "nothing_left"),
    pytest.mark.timeout(400),
]

NEXT = f"{sys.executable} -c '{SUBMIT_SUCCESSOR}'"
RUN = (
    *("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--device", "cpu"),
    *("--set", "launch.threads_per_process=1", "paced.py", "--layers", "1", "--width", "32"),
    *("--heads", "2", "--seq-len", "32", "--batch-size", "2", "--log-every", "1"),
    *("--save-every", "100000"),
)


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    return add_scripts(here)


HELD_S = 120  # Slurm holds a requeue for this long


def now(made: JobRecord) -> JobRecord:
    return records.read(made.paths)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# By hand, without agents


def test_a_successor_starts_at_once_without_the_bad_node(submit: Submit) -> None:
    body = f"""
if [[ ! -e $1/first ]]; then
  hostname > "$1/first"; export PET_LEFT=over
  {NEXT} "$1" "$SLURMD_NODENAME" > "$1/said" 2>&1
  echo "$SLURMD_NODENAME" > "$1/bad"
  date +%s.%N > "$1/ended"
else
  date +%s.%N > "$1/begun"; echo "$SLURMD_NODENAME" > "$1/good"; env > "$1/env"
fi
"""
    made = submit(body)
    root = made.paths.root
    wait_for(lambda: text(root / "env"), "the start of the successor", 90)
    wait_for(lambda: text(root / "ended"), "the end of the first job", 90)  # nobody waited for it
    new = now(made)
    assert text(root / "said") == f"{new.job_id}\n"
    assert new.earlier_job_ids == (made.job_id,)
    assert text(root / "good") != text(root / "bad")
    assert "PET_LEFT" not in text(root / "env")
    assert made.paths.runs_dir.job_link(new.job_id).resolve() == root.resolve()
    waited_s = float(text(root / "begun")) - float(text(root / "ended"))
    assert waited_s < HELD_S


# The real thing


def test_a_training_that_was_cancelled_with_a_checkpoint_is_resumed(
    here: Project, cluster: Cluster
) -> None:
    job_id = here.submit(*RUN, "--max-steps", "240")
    here.wait_for_line(job_id, "step 6/")
    done = here.cli("cancel", "--checkpoint", job_id)
    assert done.returncode == 0, done.stderr
    assert "written after" in done.stderr
    here.ok("status", job_id, "--wait")
    saved, _ = checkpoint_files.newest(here.run_dir(job_id) / "checkpoints")
    assert saved is not None
    assert here.json("status", job_id)["state"] == "CANCELLED"
    assert here.cli("resume", job_id, "--strategy", "zero2").returncode == 2

    done = here.cli("resume", job_id, "--time", "30", "--parsable")
    assert done.returncode == 0, done.stderr
    assert f"step-{saved.step:08d}\n" in done.stderr
    second = done.stdout.strip()
    assert second != job_id
    assert here.cli("resume", job_id).returncode == 2  # it is active
    here.ok("status", job_id, "--wait")
    status = here.json("status", job_id)
    assert (status["state"], status["job_id"]) == ("COMPLETED", second)
    assert status["earlier_job_ids"] == [job_id]
    first, _ = status["attempts"]
    assert (first["cause"], first["checkpoint"], first["lost_steps"]) == (
        "interrupted",
        saved.step,
        0,
    )
    assert f"step {saved.step + 1}/" in here.logs(job_id)
    assert here.cli("resume", job_id).stdout == ""


def test_a_chain_goes_on_where_its_first_job_left(here: Project, cluster: Cluster) -> None:
    argv = ("--chain", "3", "--time", "1", "--set", "slurm.signal=B:USR2@30", *RUN)
    job_id = here.submit(*argv, "--max-steps", "400000")
    root = here.run_dir(job_id)
    record = json.loads((root / "job.json").read_text())
    assert record["chain_length"] == 3
    first, second, third = job_id, *record["chained_job_ids"]

    def has_moved() -> bool:
        return bool(json.loads((root / "job.json").read_text())["job_id"] == second)

    wait_for(has_moved, "the second job of the chain", 200)
    wait_for(lambda: (root / "attempts" / "2").is_dir(), "its attempt", 100)
    here.ok("cancel", first)
    for each in (first, second, third):
        cluster.wait_job(each, timeout_s=60)
    status = here.json("status", first)
    assert status["attempts"][0]["cause"] == "interrupted"
    assert status["earlier_job_ids"] == [first]


def test_the_rest_of_a_chain_ends_at_once_where_all_is_done(
    here: Project, cluster: Cluster
) -> None:
    job_id = here.submit("--chain", "2", *RUN, "--max-steps", "3")
    (later,) = json.loads((here.run_dir(job_id) / "job.json").read_text())["chained_job_ids"]
    assert cluster.wait_job(job_id) == "COMPLETED"
    assert cluster.wait_job(later, timeout_s=60) == "COMPLETED"
    assert here.json("status", later)["attempt"] == 1
    assert here.json("status", later)["state"] == "COMPLETED"
