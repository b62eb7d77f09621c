"""`doctor` on a real Slurm: nothing fails on a healthy one, and a stopped part is named."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health.trial import read_nodes
from tests.cluster.cluster import Cluster
from tests.namespaces import small_disk
from tests.patience import patience, wait_for
from tests.road import Project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

TWO = ("--only", "slurm", "-N2", "--gpus-per-node", "2")


def test_a_healthy_site(cluster: Cluster, here: Project) -> None:
    del cluster
    done = here.cli("doctor", "--json", *TWO, "fail.py")
    found = {each["id"]: each for each in json.loads(done.stdout)["checks"]}
    assert {each["status"] for each in found.values()} == {"ok"}, found
    assert found["slurm.submit"]["text"] == "sbatch accepts the job"


# The nodes

NODES = ("--nodes", "4", "--device", "cpu", "--skip", "config,python,slurm")


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


def forget_jobs(cluster: Cluster, node: str) -> None:
    """Have Slurm give up what it wants to end on a node, as an administrator would."""
    cluster.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=stuck"])


def test_four_healthy_nodes(cluster: Cluster, here: Project) -> None:
    started = time.monotonic()
    found, answer = checked(here)
    assert time.monotonic() - started < 20 * patience()
    bad = {name: each for name, each in found.items() if each[0]["status"] not in ("ok", "skip")}
    assert bad.keys() <= {"path.runs"}, bad  # of this test's directory, in /tmp
    nodes = list(cluster.shape.node_names)
    for name in ("node.report", "node.compute", "net.reduce"):
        assert [each["status"] for each in found[name]] == ["ok"], found[name]
        assert found[name][0]["nodes"] == nodes
    assert {"net.meet", "same.versions"} <= found.keys()
    assert answer["exclude"] is None
    assert read_nodes(Path(answer["run_dir"])).keys() == set(nodes)


@pytest.mark.long
def test_a_node_that_is_stuck_is_named_and_the_others_are_judged(
    cluster: Cluster, here: Project
) -> None:
    settle(cluster)
    stuck, others = cluster.shape.node_names[2], cluster.shape.node_names[:2]
    with cluster.slurmd_suspended(stuck):
        found, answer = checked(here)
    forget_jobs(cluster, stuck)
    worst = found["node.report"][0]
    assert (worst["status"], worst["nodes"]) == ("fail", [stuck])
    assert answer["exclude"] == stuck
    failed = {name: rows for name, rows in found.items() if "fail" in [r["status"] for r in rows]}
    assert answer["counts"]["fail"] == 1, failed
    assert failed.keys() == {"node.report"}, failed
    for name in ("node.shm", "node.compute", "net.reduce"):
        assert [each["status"] for each in found[name]] == ["ok"], found[name]
        assert set(others) < set(found[name][0]["nodes"])


def bad_of(found: dict[str, list[dict[str, Any]]]) -> set[tuple[str, str, str]]:
    """Return the status, id and nodes of what is noted or failed; what differs if none is named."""
    return {
        (each["status"], name, " ".join(each["nodes"]) or each["text"].split(":")[0])
        for name, checks in found.items()
        for each in checks
        if each["hint"] and name != "path.runs"
    }


def by_node(*lines: str) -> tuple[str, str]:
    """Return the option for setup lines, each `NODE) COMMANDS;;` of bash's case."""
    return "--setup", "\n".join(("case $SLURMD_NODENAME in", *lines, "esac"))


def modules(path: Path, **files: str) -> Path:
    """Write modules for a node's PYTHONPATH; `__` in a name is a directory."""
    for name, text in files.items():
        file = path / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


NO_TORCH = "raise ImportError('libcudart.so.12: cannot open shared object file')"


def test_each_node_is_broken_in_its_own_way(
    cluster: Cluster, here: Project, tmp_path: Path
) -> None:
    settle(cluster)
    _, second, third, fourth = cluster.shape.node_names
    about = tmp_path / "old" / "accelerate-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.1\n")
    broken = modules(tmp_path / "broken", torch=NO_TORCH)
    with small_disk(tmp_path / "small", 1) as disk:
        disk.fill()
        setup = by_node(
            f"{second}) export PYTHONPATH={about.parent}; ulimit -n 300;;",
            f"{third}) export TMPDIR={disk.root};;",
            f"{fourth}) export PYTHONPATH={broken};;",
        )
        found, answer = checked(here, *setup)
    assert bad_of(found) == {
        ("note", "node.files", second),
        ("fail", "same.versions", "accelerate"),
        ("note", "node.tmp", third),
        ("fail", "node.compute", fourth),
    }
    texts = {name: checks[0]["text"] for name, checks in found.items()}
    assert f"accelerate: {second} has 0.1, the other 3 have" in texts["same.versions"]
    assert "libcudart" in texts["node.compute"]
    assert {each["status"] for each in found["net.reduce"]} == {"ok", "skip"}
    assert answer["exclude"] == fourth


@pytest.mark.long
def test_a_node_that_does_not_reach_the_first(cluster: Cluster, here: Project) -> None:
    settle(cluster)
    first, *others, fourth = cluster.shape.node_names
    ports = f"to {cluster.shape.address(first)} ipproto tcp dport 20000-29999 prohibit pref 100"
    cluster.run_on(fourth, ["ip", "rule", "add", *ports.split()])
    try:
        found, answer = checked(here)
    finally:
        cluster.run_on(fourth, ["ip", "rule", "del", *ports.split()])
    assert bad_of(found) == {("fail", "node.report", fourth)}
    assert f"cannot reach the conductor on {first}" in found["node.report"][0]["text"]
    assert found["net.reduce"][0]["nodes"] == [first, *others]
    assert answer["exclude"] == fourth


@pytest.mark.long
@pytest.mark.parametrize("free", [True, False])
def test_an_interrupt_cancels_the_job(cluster: Cluster, here: Project, *, free: bool) -> None:
    settle(cluster)
    if not free:
        cluster.sbatch("-N4", "--exclusive", "-o", "/dev/null", "--wrap", "srun sleep 60")
    watched = here.start("doctor", *NODES)
    watched.wait_for("of 4 nodes reported" if free else "Ctrl-C cancels it")
    watched.process.send_signal(signal.SIGINT)
    assert watched.end() == 130
    wait_for(lambda: "doctor" not in cluster.run(["squeue", "-h"]).stdout, "no job is left", 30)
    cluster.run(["scancel", "--me"])
    settle(cluster)


@pytest.mark.long
def test_the_first_node_is_stuck(cluster: Cluster, here: Project) -> None:
    settle(cluster)
    first, *others = cluster.shape.node_names
    with cluster.slurmd_suspended(first):
        found, answer = checked(here)
    forget_jobs(cluster, first)
    assert answer["exclude"] == first
    assert found["net.reduce"][0]["status"] == "ok"
    assert found["net.reduce"][0]["nodes"] == others
    settle(cluster)
