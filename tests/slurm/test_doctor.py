"""`doctor` on a real Slurm: nothing fails on a healthy one, and a stopped part is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health.reports import reported
from tests.cluster.cluster import Cluster
from tests.patience import PATIENCE, wait_for
from tests.road import Project, project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

TWO = ("--only", "slurm", "-N2", "--gpus-per-node", "2")


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    return project(tmp_path / "project", tmp_path / "state")


def looked(here: Project, *args: str) -> dict[str, dict[str, Any]]:
    done = here.cli("doctor", "--json", *TWO, *args, "fail.py")
    return {each["id"]: each for each in json.loads(done.stdout)["checks"]}


def test_a_healthy_site(cluster: Cluster, here: Project) -> None:
    del cluster
    found = looked(here)
    assert {each["status"] for each in found.values()} == {"ok"}, found
    assert "nodes" in found["slurm.submit"]["text"]


def test_a_request_that_slurm_would_refuse(cluster: Cluster, here: Project) -> None:
    del cluster
    found = looked(here, "-N", "900")
    failed = {name for name, each in found.items() if each["status"] == "fail"}
    assert failed == {"slurm.limits", "slurm.submit"}


def test_a_site_without_accounting(cluster_no_accounting: Cluster, here: Project) -> None:
    del cluster_no_accounting
    found = looked(here)
    skipped = {name for name, each in found.items() if each["status"] == "skip"}
    assert skipped == {"slurm.accounting", "slurm.account"}
    assert {each["status"] for each in found.values()} == {"ok", "skip"}, found


def test_slurmdbd_that_does_not_answer(cluster_slurmdbd_stopped: Cluster, here: Project) -> None:
    del cluster_slurmdbd_stopped
    found = looked(here)
    assert found["slurm.accounting"]["status"] == "note", found
    assert "fail" not in {each["status"] for each in found.values()}


# The nodes

NODES = (
    "--nodes",
    "4",
    "--device",
    "cpu",
    "--skip",
    "config",
    "--skip",
    "python",
    "--skip",
    "slurm",
)


def checked(here: Project, *args: str) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return what was found on the nodes by id, and the whole answer."""
    done = here.cli("doctor", "--json", *NODES, *args)
    answer = json.loads(done.stdout)
    found: dict[str, list[dict[str, Any]]] = {}
    for each in answer["checks"]:
        found.setdefault(each["id"], []).append(each)
    assert done.returncode == (3 if answer["counts"]["fail"] else 0), done.stderr
    return found, answer


def settle(cluster: Cluster) -> None:
    """Wait until the nodes are free and no job is left in the queue."""
    cluster.heal()
    wait_for(lambda: not cluster.run(["squeue", "-h"]).stdout, "an empty queue", 30)


def test_four_healthy_nodes(cluster: Cluster, here: Project) -> None:
    started = time.monotonic()
    found, answer = checked(here)
    assert time.monotonic() - started < 20 * PATIENCE
    bad = {name: each for name, each in found.items() if each[0]["status"] not in ("ok", "skip")}
    assert bad.keys() <= {"path.runs"}, bad  # this test's directory is in /tmp
    nodes = list(cluster.shape.node_names)
    for name in ("node.report", "node.compute", "path.visible", "net.link", "net.reduce"):
        assert [each["status"] for each in found[name]] == ["ok"], found[name]
        assert found[name][0]["nodes"] == nodes
    assert {"net.meet", "path.rate", "same.versions", "same.clock"} <= found.keys()
    assert answer["exclude"] is None
    assert reported(Path(answer["run_dir"])) == set(nodes)


def test_a_node_that_is_stuck_is_named_and_the_others_are_judged(
    cluster: Cluster, here: Project
) -> None:
    settle(cluster)
    stuck, others = cluster.shape.node_names[2], cluster.shape.node_names[:2]
    with cluster.slurmd_suspended(stuck):
        found, answer = checked(here)
    worst = found["node.report"][0]
    assert (worst["status"], worst["nodes"]) == ("fail", [stuck])
    assert answer["exclude"] == stuck
    assert answer["counts"]["fail"] == 1, found
    for name in ("node.shm", "node.compute", "net.link", "net.reduce"):
        assert [each["status"] for each in found[name]] == ["ok"], found[name]
        assert set(others) < set(found[name][0]["nodes"])


@pytest.mark.long
def test_the_first_node_is_stuck(cluster: Cluster, here: Project) -> None:
    settle(cluster)
    first, *others = cluster.shape.node_names
    with cluster.slurmd_suspended(first):
        found, answer = checked(here)
    assert answer["exclude"] == first
    assert found["net.reduce"][0]["status"] == "ok"
    assert found["net.reduce"][0]["nodes"] == others
    settle(cluster)
