"""Jobs on a Slurm that enforces what it is configured to: memory limits and accounts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.cluster import network
from tests.cluster.cluster import OVER, Cluster
from tests.cluster.fixtures import another
from tests.patience import finished
from tests.road import LIGHT, Project
from tests.slurm.test_diagnose import WAITING, diagnosed
from tests.slurm.test_waiting import waits

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]

CGROUP = 5  # its slot
VICTIM = "2"  # the first rank of the second node
FILLS = ("fail.py", "memory", VICTIM)
TWO = ("-N2", "--gpus-per-node", "2", "--cpus-per-task", "1", *LIGHT, "--env", "ALONE=1")


@pytest.fixture(scope="module", name="strict")
def _strict(cluster: Cluster) -> Iterator[Cluster]:
    """Bring up a cluster whose kernel enforces --mem, if it can, and that refuses accounts."""
    del cluster  # it has found that this machine is fit
    limit = "" if network.memory_refusal() else "cgroup"
    with another(CGROUP, nodes=2, only_associations=True, memory_limit=limit) as strict:
        yield strict


def test_a_rank_that_the_kernel_kills(here: Project, strict: Cluster) -> None:
    if not strict.shape.memory_limit:
        pytest.skip(f"no memory limit can be set: {network.memory_refusal()}")
    here.extra.update(strict.env)
    job_id = here.submit(*TWO, "--mem", "1G", "--time", "5", *FILLS)
    strict.wait_job(job_id, {*OVER, "OUT_OF_MEMORY"}, 120)
    found = diagnosed(here, job_id)
    verdict = found["verdict"]
    assert (verdict["class"], verdict["status"]) == ("host_oom", "established")
    assert (verdict["ranks"], verdict["nodes"]) == (VICTIM, [strict.nodes[1]])
    assert "--mem 2G" in verdict["do"][0]
    assert any("may use 1 GiB" in each["text"] for each in found["evidence"])
    short = f"host_oom, rank {VICTIM} on {strict.nodes[1]}"
    assert short in here.ok("status", job_id)
    assert "The node or the job ran out of host memory" in here.ok("list")


def test_an_account_that_is_not_registered(here: Project, strict: Cluster) -> None:
    here.extra.update(strict.env)
    done = here.cli("submit", *TWO, "--account", "nope", *WAITING)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert "Invalid account" in error
    assert "sacctmgr show associations" in hint
    assert here.json("list", "--all")["jobs"] == []
    assert not (here.path / "runs").exists()
    assert cause_of(here, done.stderr) == "slurm_account_invalid"
    plain = ["sbatch", "--account=nope", "-o", "/dev/null", "--wrap=true"]
    assert cause_of(here, strict.run(plain, check=False).stderr) == "slurm_account_invalid"


def cause_of(here: Project, text: str) -> str:
    """Pipe a text into `diagnose`."""
    argv = [sys.executable, "-m", "clusterrun", "diagnose", "--log", "-", "--json"]
    environ = {**here.environ, **here.extra}
    done = finished(argv, cwd=here.path, env=environ, input=text)
    assert done.returncode == 3, done.stderr
    found: str = json.loads(done.stdout)["verdict"]["class"]
    return found


@pytest.mark.parametrize(
    ("limit", "code", "can_start"),
    [
        ("MaxJobs=0", "AssocMaxJobsLimit", True),
        ("MaxTRESPerJob=node=1", "AssocMaxNodePerJobLimit", False),
        ("MaxWall=1", "AssocMaxWallDurationPerJobLimit", False),
    ],
)
def test_a_limit_of_the_account(
    here: Project, strict: Cluster, limit: str, code: str, can_start: bool
) -> None:
    here.extra.update(strict.env)
    of_root = ("sacctmgr", "-i", "modify", "user", "root", "set")
    strict.run([*of_root, limit])
    try:
        reason = waits(here, here.submit(*TWO, "--time", "5", *WAITING), code)
    finally:
        strict.run(["scancel", "--me"])
        strict.run([*of_root, f"{limit.rpartition('=')[0]}=-1"])
    assert reason["can_start"] is can_start
    assert code not in reason["text"]
