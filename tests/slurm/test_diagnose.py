"""`diagnose` of what a real Slurm did to a job, and of what it refused."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.hostlist import parse_hostlist
from tests.cluster.cluster import OVER, Cluster
from tests.local.test_diagnose import OF_ONE_RANK
from tests.patience import wait_for
from tests.road import LIGHT, Project

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.long,
    pytest.mark.timeout(400),
]

TWO = ("-N2", "--gpus-per-node", "1", "--cpus-per-task", "1", *LIGHT, "--env", "ALONE=1")
FOUR = ("-N2", "--gpus-per-node", "2", "--cpus-per-task", "1", "--device", "cpu")
WAITING = ("fail.py", "wait", "0", "1000")


def diagnosed(here: Project, *argv: str) -> dict[str, Any]:
    done = here.cli("diagnose", *argv, "--json")
    assert done.returncode == 3, f"{done.stdout}\n{done.stderr}"
    print(here.cli("diagnose", *argv).stdout)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def started(here: Project, *options: str) -> str:
    job_id = here.submit(*TWO, *options, *WAITING)
    here.wait_for_line(job_id, "ready", 2)
    return job_id


def test_the_time_limit(here: Project, cluster: Cluster) -> None:
    job_id = started(here, "--time", "1")
    assert cluster.wait_job(job_id) == "TIMEOUT"
    found = diagnosed(here, job_id)
    assert found["verdict"]["class"] == "slurm_time_limit"
    resume = f"clusterrun resume {job_id} --from scratch --time 00:02:00"
    assert found["verdict"]["do"][0] == f"double the time limit: {resume}"


@pytest.mark.parametrize("how", ["scancel", "clusterrun cancel"])
def test_a_cancellation(here: Project, cluster: Cluster, how: str) -> None:
    job_id = started(here)
    if how == "scancel":
        cluster.run(["scancel", job_id])
    else:
        here.ok("cancel", job_id)
    assert cluster.wait_job(job_id) == "CANCELLED"
    assert diagnosed(here, job_id)["verdict"]["class"] == "slurm_cancelled"


def test_a_preemption_that_ends_the_job(here: Project, cluster: Cluster) -> None:
    job_id = started(here, "-p", "abrupt", "--set", "slurm.requeue=false")
    everything = ("-p", "high", f"-N{len(cluster.nodes)}", "--exclusive", "-o", "/dev/null")
    cluster.sbatch(*everything, "--wrap=sleep 2")
    assert cluster.wait_job(job_id, {*OVER, "PREEMPTED"}) == "PREEMPTED"
    assert diagnosed(here, job_id)["verdict"]["class"] == "slurm_preempted"


def test_a_node_that_is_lost(here: Project, cluster: Cluster) -> None:
    job_id = started(here)
    lost = hosts(cluster, job_id)[-1]
    cluster.power_off(lost)
    try:
        outcome = here.run_dir(job_id) / "attempts" / "1" / "outcome.json"
        wait_for(outcome.exists, "the end of the attempt")
        found = diagnosed(here, job_id, "--attempt", "1")
    finally:
        cluster.heal()
    assert found["verdict"]["class"] == "slurm_node_fail"
    assert found["verdict"]["nodes"] == found["verdict"]["exclude_nodes"] == [lost]


def hosts(cluster: Cluster, job_id: str) -> list[str]:
    """Return the job's hosts in the order of their ranks."""
    return parse_hostlist(cluster.run(["squeue", "-h", "-j", job_id, "-o", "%N"]).stdout.strip())


def looked(here: Project, job_id: str, *options: str) -> dict[str, Any]:
    done = here.cli("diagnose", job_id, *options, "--json")
    assert done.returncode in (0, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_where_ranks_are_and_a_node_that_does_not_answer(here: Project, cluster: Cluster) -> None:
    job_id = started(here, "--time", "10")
    (group,) = looked(here, job_id, "--stacks")["groups"]
    assert (group["ranks"], group["is_waiting"]) == ("0-1", False)
    assert "fail.py:" in group["where"]
    lost = hosts(cluster, job_id)[-1]
    cluster.cut(lost)
    try:
        found = looked(here, job_id, "--stacks")
    finally:
        cluster.restore(lost)
    assert (found["groups"][0]["ranks"], found["silent"]) == ("0", [lost])


@pytest.mark.parametrize(("how", "options", "cause", "status"), OF_ONE_RANK)
def test_what_one_rank_did_is_found_on_its_node(
    here: Project, cluster: Cluster, how: str, options: tuple[str, ...], cause: str, status: str
) -> None:
    job_id = here.submit(*FOUR, *options, "broken.py", how)
    assert cluster.wait_job(job_id) == "FAILED"
    verdict = diagnosed(here, job_id)["verdict"]
    nodes = read_attempt(RunPaths(root=here.run_dir(job_id)), 1).nodes
    assert (verdict["class"], verdict["status"]) == (cause, status)
    assert (verdict["ranks"], verdict["nodes"]) == ("2", [*nodes][1:])


@pytest.mark.parametrize(
    ("option", "cause"),
    [
        ("--partition=nowhere", "slurm_partition_invalid"),
        ("--mem=9999G", "slurm_node_config"),
        ("--gres=gpu:99", "slurm_node_config"),
        ("--constraint=fast", "slurm_node_config"),
        ("--nodelist=nowhere", "slurm_node_config"),
        ("--gres=tpu:1", "slurm_gres_invalid"),
        ("--deadline=2001-01-01", "slurm_qos_limit"),
        ("--time=soon", "slurm_option_invalid"),
    ],
)
def test_what_sbatch_refuses(here: Project, cluster: Cluster, option: str, cause: str) -> None:
    log = here.path / "sbatch.err"
    with log.open("w") as file:
        argv = ["sbatch", option, "--begin=2001-01-01", "-o", "/dev/null", "--wrap=true"]
        done = subprocess.run(argv, env={**here.environ, **here.extra}, stderr=file, check=False)
    assert done.returncode in (1, 255), log.read_text()
    assert diagnosed(here, str(log))["verdict"]["class"] == cause


def test_a_job_of_another_tool_by_its_id(here: Project, cluster: Cluster) -> None:
    script = "echo 'ValueError: bad sample' >&2; exit 1"
    argv = ["sbatch", "--parsable", "--array=3", "-o", "%A-%a.txt", "-e", "%A-%a.bad"]
    done = subprocess.run(
        [*argv, f"--wrap={script}"],
        env={**here.environ, **here.extra},
        cwd=here.path,
        capture_output=True,
        text=True,
        check=True,
    )
    job_id = f"{done.stdout.strip()}_3"
    assert cluster.wait_job(job_id) == "FAILED"
    found = diagnosed(here, job_id)
    assert found["verdict"]["class"] == "user_code_exception"
    unknown = here.cli("diagnose", "999999")
    assert unknown.returncode == 4
    assert "or pass the job's log, such as slurm-4711.out" in unknown.stderr
