"""`status` of jobs that a real Slurm keeps waiting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.patience import wait_for
from tests.road import LIGHT, Project

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(300)]

ONE = ("--gpus-per-node", "1", "--cpus-per-task", "1", *LIGHT, "--env", "ALONE=1")
WAITING = ("fail.py", "wait", "0", "1000")
LIMITS = "MaxTime={} MaxNodes={} Nodes={}"


@pytest.fixture(autouse=True)
def _as_before(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.run(["scancel", "--me"])
    limit(cluster)
    cluster.run(["scontrol", "delete", "reservation=maint"], check=False)
    cluster.heal()


def limit(
    cluster: Cluster, time: str = "UNLIMITED", most: str = "UNLIMITED", nodes: str = ""
) -> None:
    """Limit partition `low`."""
    words = LIMITS.format(time, most, nodes or ",".join(cluster.nodes)).split()
    cluster.run(["scontrol", "update", "PartitionName=low", *words])


def occupy(cluster: Cluster, *nodes: str) -> None:
    """Run a job of another user's kind on whole nodes for an hour."""
    where = (f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--exclusive")
    job_id = cluster.sbatch(
        *where, "--partition=main", "--time=60", "--output=/dev/null", "--wrap=sleep 999"
    )
    wait_for(lambda: cluster.job_state(job_id) == "RUNNING", "the nodes are in use")


def waits(here: Project, job_id: str, code: str) -> dict[str, Any]:
    """Wait until Slurm gives this reason, and return what `status` says about it."""

    def reason() -> dict[str, Any]:
        done = here.cli("status", job_id, "--json")
        found: dict[str, Any] = json.loads(done.stdout)["reason"] or {"code": ""}
        return found

    wait_for(lambda: reason()["code"] == code, f"job {job_id} waits: {code}", 60)
    print(here.cli("status", job_id).stdout)
    return reason()


def test_busy_nodes_and_fewer_that_are_idle(here: Project, cluster: Cluster) -> None:
    occupy(cluster, *cluster.nodes[:3])
    reason = waits(here, here.submit("-N3", "--time", "30", *ONE, *WAITING), "Resources")
    (fact,) = reason["facts"]
    assert (fact["kind"], fact["asked"], fact["limit"]) == ("nodes", 3, 4)
    assert fact["uses"]["busy"] == 3
    assert "sooner" in reason
    assert reason["can_start"] is True


def test_another_partition_has_idle_nodes(here: Project, cluster: Cluster) -> None:
    limit(cluster, nodes=cluster.nodes[0])
    occupy(cluster, cluster.nodes[0])
    job_id = here.submit(
        "-N1", "-p", "low", "--set", "slurm.exclusive=true", "--time", "30", *ONE, *WAITING
    )
    reason = waits(here, job_id, "Resources")
    offered = {one["partition"]: one["idle"] for one in reason["sooner"]}
    assert offered.popitem()[1] == 3
    again = here.cli(*reason["sooner"][0]["command"].split()[1:], "--parsable")
    assert again.returncode == 0, again.stderr
    wait_for(lambda: cluster.job_state(again.stdout.split()[0]) == "RUNNING", "it runs there")


def test_a_limit_of_the_partition(here: Project, cluster: Cluster) -> None:
    limit(cluster, time="10", most="2")
    for nodes, minutes, code, kind, numbers in (
        ("-N1", "30", "PartitionTimeLimit", "too_long", (1800, 600)),
        ("-N3", "5", "PartitionNodeLimit", "too_many_nodes", (3, 2)),
    ):
        job_id = here.submit(nodes, "--time", minutes, "-p", "low", *ONE, *WAITING)
        reason = waits(here, job_id, code)
        fact = next(fact for fact in reason["facts"] if fact["kind"] == kind)
        assert (fact["asked"], fact["limit"]) == numbers
        assert reason["can_start"] is False
        assert reason["sooner"]


def test_maintenance_ahead_and_a_time_that_ends_before_it(here: Project, cluster: Cluster) -> None:
    when = ("StartTime=now+60minutes", "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS")
    where = f"Nodes={','.join(cluster.nodes)}"
    cluster.run(["scontrol", "create", "reservation", "ReservationName=maint", *when, where])
    reason = waits(here, here.submit("-N2", "--time", "120", *ONE, *WAITING), "ReqNodeNotAvail")
    assert [fact["kind"] for fact in reason["facts"]] == ["reservation"]
    (change,) = reason["sooner"]
    assert 2400 <= change["limit_s"] < 3600
    again = here.cli(*change["command"].split()[1:], "--parsable")
    wait_for(lambda: cluster.job_state(again.stdout.split()[0]) == "RUNNING", "it runs before")
