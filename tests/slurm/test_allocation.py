"""`--cluster allocation` inside a real salloc: srun starts the run, which ends with the job."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.patience import finished, wait_for
from tests.road import LIGHT, Project

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(300)]

SUBMIT = "python -m clusterrun submit --cluster allocation --gpus-per-node 2 --device cpu"
HELLO = """\
import os, sys, time
own = [name for name in os.environ if name.startswith("SLURM_JOB")]
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], own, flush=True)
time.sleep(float(sys.argv[1]))
"""
SAVER = """\
import time
import torch.distributed as dist
from clusterrun import runtime
dist.init_process_group("gloo")
saves = runtime.Checkpoints()
newest = saves.newest()
step = newest.step if newest else 0
runtime.should_checkpoint()  # a signal now asks for a checkpoint
dist.barrier()
print(f"begins at step {step}", flush=True)
last = step + 5 if newest else 100_000
while step < last:
    time.sleep(0.05)
    step += 1
    if runtime.should_checkpoint():
        saves.save(step, lambda directory: (directory / f"{dist.get_rank()}").write_text("w"))
        if runtime.should_stop():
            break
"""


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    (here.path / "hello.py").write_text(HELLO)
    (here.path / "saver.py").write_text(SAVER)
    return here


def salloc(here: Project, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script on the login side of an allocation of two nodes."""
    argv = ["salloc", "-Q", "-N2", "--gpus-per-node=2", "-c2", "bash", "-ec", script]
    env = {**here.environ, **here.extra, "LIGHT": " ".join(LIGHT)}
    return finished(argv, timeout_s=120, cwd=here.path, env=env)


def test_srun_starts_the_ranks_on_all_nodes_of_an_allocation(here: Project) -> None:
    done = salloc(here, f"{SUBMIT} $LIGHT --wait hello.py 0")
    assert done.returncode == 0, done.stderr
    (job,) = here.json("list", "--all")["jobs"]
    assert job["state"] == "COMPLETED"
    text = here.ok("logs", job["job_id"], "-a", "-o", "raw")
    told = sorted(line for line in text.splitlines() if line.startswith("rank "))
    assert told == [f"rank {rank} of 4 []" for rank in range(4)]


@pytest.mark.long
def test_cancel_leaves_no_step_in_the_allocation(here: Project) -> None:
    done = salloc(
        here,
        f"job=$({SUBMIT} $LIGHT --parsable hello.py 600)\n"
        'python -m clusterrun cancel "$job"; python -m clusterrun status "$job" --wait\n'
        'echo "steps: $(squeue -h -s -j $SLURM_JOB_ID -o %j | grep -c bash)"',
    )
    assert done.returncode == 0, done.stderr
    assert "note: the job ends with this allocation" in done.stderr
    assert "state      CANCELLED" in done.stdout
    assert "steps: 0" in done.stdout


@pytest.mark.long
@pytest.mark.torch
def test_a_run_saves_when_its_allocation_ends_and_resumes_in_another(
    here: Project, cluster: Any
) -> None:
    done = salloc(
        here,
        f"job=$({SUBMIT} --parsable saver.py)\n"
        'until python -m clusterrun logs "$job" | grep "begins at step 0"; do sleep 1; done\n'
        "scancel $SLURM_JOB_ID; sleep 60",
    )
    (job,) = here.json("list", "--all")["jobs"]
    assert "begins at step 0" in done.stdout, done.stderr
    wait_for((here.run_dir(job["job_id"]) / "end.json").exists, "the run to end")
    assert here.json("status", job["job_id"])["state"] == "TIMEOUT"
    cluster.wait_no_processes(30)
    outside = here.cli("resume", job["job_id"])
    assert outside.returncode == 2
    assert "this shell is not in an allocation" in outside.stderr
    again = salloc(here, f"python -m clusterrun resume {job['job_id']} --wait")
    assert again.returncode == 0, again.stderr
    assert "begins at step 0" not in here.logs(here.json("list", "--all")["jobs"][0]["job_id"])
