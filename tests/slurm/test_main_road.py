"""The main road on a real Slurm: one world, its logs and status, and every way to fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from typing import Any

import pytest

from tests.patience import finished, patience, wait_for
from tests.road import LIGHT, Project

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(300)]

TWO = ("-N2", "--gpus-per-node", "1", *LIGHT)
ALONE = ("--env", "ALONE=1")
TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--seq-len", "32", "--batch-size", "2")


def sacct(cluster: Any, job_id: str) -> tuple[str, str]:
    """Ask accounting for a job's state and exit status; it lags by a moment."""
    for _ in range(50):
        argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode"]
        row = cluster.run(argv).stdout.strip()
        is_early = row.startswith(("RUNNING", "PENDING")) or row == "FAILED|0:0"  # status follows
        if row and not is_early:
            state, code = row.split("|")
            return state, code
        time.sleep(0.2)
    raise AssertionError(f"accounting never heard of the end of {job_id}")


def test_eight_ranks_on_two_hosts_are_one_world_and_every_view_agrees(
    cluster: Any, here: Project
) -> None:
    argv = ("--nodes", "2", "--gpus-per-node", "4", "--device", "cpu", "train_lm.py", *TINY)
    done = here.cli("submit", *argv, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    matched = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
    assert matched, done.stdout
    job_id = matched[1]
    assert cluster.wait_job(job_id) == "COMPLETED"
    assert here.json("status", job_id)["state"] == "COMPLETED"
    listed = here.json("list", "--all")["jobs"]
    assert [(job["job_id"], job["state"]) for job in listed] == [(job_id, "COMPLETED")]
    assert sacct(cluster, job_id) == ("COMPLETED", "0:0")
    assert json.loads((here.run_dir(job_id) / "end.json").read_text())["exit_code"] == 0
    (ready,) = [event for event in here.events(job_id) if event["type"] == "world_ready"]
    first, second = ready["hosts"]
    assert ready["world_size"] == 8
    text = here.logs(job_id)
    assert "held-out loss" in text
    for rank in range(8):
        assert re.search(rf"rank {rank}/8 on ({first}|{second})\b", text)
    assert {first, second} <= set(re.findall(r"^[\d:]+ (\w+):", text, re.MULTILINE))
    assert here.cli("logs", job_id, "--rank", "9").returncode == 2
    of_second = here.ok("logs", job_id, "--node", second, "-a", "-n", "all", "--no-dedup")
    assert f"{second}:" in of_second
    assert f"{first}:" not in of_second
    cluster.wait_no_processes()


def test_status_list_logs_and_cancel_work_without_accounting(cluster: Any, here: Project) -> None:
    with cluster.slurmdbd_stopped():
        finished = here.submit(*TWO, "alone.py")
        assert cluster.wait_job(finished) == "COMPLETED"
        assert here.json("status", finished)["state"] == "COMPLETED"
        assert "rank 1/2 on" in here.logs(finished)
        running = here.submit(*TWO, *ALONE, "fail.py", "none", "0")
        here.wait_for_line(running, "ready", 2)
        assert here.json("status", running)["state"] == "RUNNING"
        here.ok("cancel", running)
        here.ok("status", running, "--wait")
        states = {job["job_id"]: job["state"] for job in here.json("list", "--all")["jobs"]}
    assert states == {finished: "COMPLETED", running: "CANCELLED"}


TASK = """
import json, os, re
names = re.compile("SLURM_.*(TASK|PROC|LOCALID|GTIDS|DISTRIBUTION|NODES|NODEID)")
about = {name: value for name, value in sorted(os.environ.items()) if names.match(name)}
print("TASK", json.dumps({**about, "SLURM_TASK_PID": about["SLURM_TASK_PID"] == str(os.getpid())}))
"""


def test_a_rank_has_the_variables_of_a_task_of_srun(cluster: Any, here: Project) -> None:
    (here.path / "task.py").write_text(TASK)
    wrapped = f"srun --label {sys.executable} {here.path}/task.py"
    shape = ("-N2", "--ntasks-per-node=2", "-c1", "-o", f"{here.path}/srun")
    cluster.run(["sbatch", "-W", *shape, "--wrap", wrapped])
    job_id = here.submit("-N2", "--nproc-per-node", "2", "-c", "2", *LIGHT, "task.py")
    assert cluster.wait_job(job_id) == "COMPLETED", here.logs(job_id)
    ours = here.ok("logs", job_id, "-a", "-n", "all", "--no-dedup")
    shown = [sorted(re.findall("TASK {.*", t)) for t in (ours, (here.path / "srun").read_text())]
    assert len(shown[1]) == 4
    assert shown[0] == shown[1]


@pytest.mark.long
@pytest.mark.timeout(900)  # the first run builds DeepSpeed's optimizer for CPUs
@pytest.mark.parametrize("own", [False, True], ids=["zero2-offload", "own JSON with auto"])
def test_deepspeed_with_offload_saves_and_resumes(cluster: Any, here: Project, own: bool) -> None:
    how = ("--deepspeed-config", "ds_zero2_auto.json") if own else ("--strategy", "zero2-offload")
    argv = ("-N2", "--gpus-per-node", "1", "--device", "cpu", *how, "train_lm.py", *TINY)
    argv = (*argv, "--output", "saved", "--save-every", "2", "--max-steps", "4", "--log-every", "1")
    first = here.submit(*argv)
    assert cluster.wait_job(first, timeout_s=500) == "COMPLETED", here.logs(first)
    shutil.rmtree(here.path / "saved" / "step-00000004")  # as if it had been interrupted at step 3
    second = here.submit(*argv, "--resume")
    assert cluster.wait_job(second, timeout_s=280) == "COMPLETED", here.logs(second)
    text = here.logs(second)
    assert "step 3/4" in text
    assert "step 2/4" not in text
    assert (here.path / "saved" / "step-00000004" / ".complete").exists()


def by_hand(here: Project, *argv: str, script: str = "") -> str:
    """Submit with plain sbatch and return the job id."""
    done = finished(["sbatch", "--parsable", *argv], cwd=here.path, env=here.environ, input=script)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def assert_two_hosts(cluster: Any, text: str, more: str = "") -> None:
    """Hold what alone.py says: each of two ranks on a node of its own."""
    hosts = dict(re.findall(rf"rank (\d)/2 on (\w+) .*{re.escape(more)}", text))
    assert hosts.keys() == {"0", "1"}, text
    assert len(set(hosts.values()) & set(cluster.nodes)) == 2, text


def test_a_rendered_directory_submitted_by_hand_is_the_same_run(
    cluster: Any, here: Project
) -> None:
    argv = (*TWO, "alone.py", "x")
    here.ok("render", "-O", "by-hand", *argv)
    assert (here.path / "by-hand" / "job.sbatch").read_text() == here.ok("render", *argv)
    job_id = by_hand(here, "by-hand/job.sbatch")
    piped = by_hand(here, script=here.ok("render", *argv))
    for one in (job_id, piped):
        assert cluster.wait_job(one) == "COMPLETED"
        assert_two_hosts(cluster, here.logs(one), "args ['x']")
    assert here.json("status", job_id)["state"] == "COMPLETED"
    submitted = here.submit(*argv)
    cluster.wait_job(submitted)
    sent = (here.run_dir(submitted) / "job.sbatch").read_bytes()
    assert sent == (here.path / "by-hand" / "job.sbatch").read_bytes()
    held = cluster.run(["scontrol", "write", "batch_script", submitted, "-"]).stdout
    assert held.rstrip("\n") == sent.decode().rstrip("\n")


def test_numbers_changed_by_hand_are_refused_and_sruns_own_error_is_shown(
    cluster: Any, here: Project
) -> None:
    script = here.ok("render", *TWO, "alone.py")
    for old, new, reason in (
        ("#SBATCH --nodes=2", "#SBATCH --nodes=1", "the job has 1 node but was rendered for 2;"),
        ("num_processes: 2", "num_processes: 4", "accelerate.yaml now has num_processes 4"),
        ("(srun --nodes=2", "(srun --nodes=1", "srun has --nodes=1, but the job was rendered"),
        ("(srun --nodes=2", "(srun --mem=900T --nodes=2", "srun: error: Unable to create step"),
    ):
        job_id = by_hand(here, script=script.replace(old, new))
        assert cluster.wait_job(job_id) == "FAILED"
        for verb in ("status", "diagnose", "logs"):
            told = here.cli(verb, job_id)
            assert reason in told.stdout + told.stderr, verb


# sacct takes 128 off a status: 137, killed by signal 9, is its 9.
REAL = ("--device", "cpu")
WAYS = [
    ("exit", "3:0", 3, (*LIGHT, *ALONE)),
    ("kill", "9:0", 137, REAL),
    ("raise", "1:0", 1, (*LIGHT, *ALONE)),
]


@pytest.mark.parametrize(("how", "code", "status", "kind"), WAYS)
def test_one_rank_that_fails_ends_the_job_everywhere_within_10_s(
    cluster: Any, here: Project, how: str, code: str, status: int, kind: tuple[str, ...]
) -> None:
    job_id = here.submit("-N2", "--gpus-per-node", "2", *kind, "fail.py", how, "3")
    here.wait_for_line(job_id, "ready", 4)
    since = time.monotonic()
    assert cluster.wait_job(job_id) == "FAILED"
    cluster.wait_no_processes()
    assert time.monotonic() - since < 10 * patience()
    assert sacct(cluster, job_id) == ("FAILED", code)
    failed = [event for event in here.events(job_id) if event["type"] == "failed"]
    assert {event["rank"] for event in failed} == {3}
    assert here.json("status", job_id)["exit"]["code"] == status
    said = here.cli("status", job_id, "--exit-status")
    assert said.returncode == 3
    assert "rank 3" in said.stdout
    if how == "raise":
        assert "no such tokenizer" in said.stdout


def test_an_agent_that_is_killed_before_the_first_checkpoint_is_no_fault_of_the_script(
    cluster: Any, here: Project
) -> None:
    job_id = here.submit("-N2", "--gpus-per-node", "2", "--device", "cpu", "fail.py", "none", "0")
    here.wait_for_line(job_id, "ready", 4)
    node = here.wait_for_event(job_id, "world_ready")["hosts"][1]
    agents = [p.pid for p in cluster.processes_on(node) if "clusterrun.node agent" in p.cmdline]
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGKILL)
    wait_for((here.run_dir(job_id) / "attempts" / "2").exists, "the second attempt", 60)
    (first, _) = here.json("status", job_id)["attempts"]
    assert (first["code"], first["cause"], first["next"]) == (123, "node_lost", "relaunch")
    assert f"{node}: its agent is gone" in here.ok("status", job_id)
    here.ok("cancel", "-y", job_id)
    cluster.wait_no_processes()


def test_ranks_that_each_make_a_world_of_their_own_fail_and_are_named(
    cluster: Any, here: Project
) -> None:
    broken = ("--env", "ACCELERATE_USE_CPU=false")
    since = time.monotonic()
    job_id = here.submit("-N2", "--gpus-per-node", "2", "--device", "cpu", *broken, "world.py")
    assert cluster.wait_job(job_id) == "FAILED"
    assert time.monotonic() - since < 40 * patience()
    assert sacct(cluster, job_id) == ("FAILED", "120:0")
    assert "accelerate has a world of 1, but the job requested 4" in here.ok("status", job_id)
    cluster.wait_no_processes()


FEWER = """
import os, sys
if os.environ.get("SLURM_NODEID") == "1" and "--num_processes" in sys.argv:
    sys.argv[sys.argv.index("--num_processes") + 1] = "2"
"""


def test_a_node_with_fewer_processes_fails_and_is_named(cluster: Any, here: Project) -> None:
    """The second node's launcher is told of two processes in all, not of four."""
    (here.path / "lib").mkdir()
    (here.path / "lib" / "sitecustomize.py").write_text(FEWER)
    fewer = ("--set", "launch.launcher=accelerate", "--env", f"PYTHONPATH={here.path / 'lib'}")
    job_id = here.submit("-N2", "--gpus-per-node", "2", "--device", "cpu", *fewer, "world.py")
    assert cluster.wait_job(job_id) == "FAILED"
    assert sacct(cluster, job_id) == ("FAILED", "120:0")
    (failed,) = re.findall(r"rank 2 on (\S+): exit 120: (.*)", here.ok("status", job_id))
    reason = (
        "world contract broken: the launcher started 1 rank on this node, but the job requested 2"
    )
    assert failed[0] in cluster.nodes
    assert failed[1] == reason
    cluster.wait_no_processes()


def test_a_shell_inside_another_job_does_not_leak_into_the_new_one(
    cluster: Any, here: Project
) -> None:
    here.extra = {
        "SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_MEM_PER_CPU": "1",
        "SBATCH_PARTITION": "nope",
        "SRUN_CPUS_PER_TASK": "3", "PET_STANDALONE": "1", "MASTER_PORT": "1", "WORLD_SIZE": "9",
        "RANK": "5", "CUDA_VISIBLE_DEVICES": "", "SLURM_CPU_BIND": "none",
    }  # fmt: skip
    argv = ("-N2", "-c8", "--gpus-per-node", "2", *LIGHT, "alone.py")
    done = here.cli("submit", "-W", *argv)
    assert done.returncode == 0, done.stderr
    assert "SBATCH_PARTITION" in done.stderr
    here.extra = {}
    assert "threads 4" in here.logs(done.stdout.split()[-1])  # of --cpus-per-task 8
