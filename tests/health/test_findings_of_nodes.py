"""What `doctor --nodes` concludes from a run: its findings, and the nodes to leave out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clusterrun.health.reports import GroupReport, NodeReport, Share
from clusterrun.shared.finding import fail, ok
from clusterrun.shared.state import JobState
from clusterrun.verbs.doctor_nodes import findings
from clusterrun.verbs.smoke import Smoke


def smoke(tmp_path: Path, printed: str = "") -> Smoke:
    """Return a job of two nodes, which have reported nothing; `printed` is its output."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "batch.out").write_text(printed)
    return Smoke(job_id="7", run_dir=tmp_path, nodes=("n1", "n2"))


def bad(found: Smoke) -> tuple[list[str], str]:
    checks, exclude = findings(found)
    return [f"{e.id} {e.summary}" for e in checks if e.fix], exclude


def test_a_job_that_ended_says_why(tmp_path: Path) -> None:
    why = "n1: a setup line exited the shell"
    ended = dataclasses.replace(smoke(tmp_path, f"clusterrun: {why}\n"), end=JobState.FAILED)
    for found in (ended, dataclasses.replace(ended, nodes=())):  # it may end before it is seen
        assert bad(found) == ([f"node.report job 7 is FAILED: {why}"], "")
    (tmp_path / "slurm" / "batch.out").unlink()
    assert bad(ended) == (["node.report job 7 is FAILED: no node has reported"], "")


def test_a_job_that_does_not_start(tmp_path: Path) -> None:
    found = dataclasses.replace(smoke(tmp_path), blocked="the nodes are down")
    assert bad(found) == (["node.report job 7 does not start: the nodes are down"], "")


def test_a_node_that_could_not_take_part_says_why(tmp_path: Path) -> None:
    report = NodeReport(node="n1", checks=(), facts={}, computed={"cpu": {"tflops": 1.0}})
    printed = "clusterrun: n1: old\nclusterrun: n2: no module\nclusterrun: n2: no python\n"
    found = dataclasses.replace(
        smoke(tmp_path, printed), found={"n1": report}, group=GroupReport(shares={"n1": Share()})
    )
    assert bad(found) == (["node.report n2: no python"], "n2")


def test_an_all_reduce_that_failed_leaves_out_no_node(tmp_path: Path) -> None:
    shares = {"n1": Share(reduce_error="timed out"), "n2": Share(reduced_s=0.1)}
    checks = {"n1": (ok("node.tmp", "fine"),), "n2": (fail("node.tmp", "full", "empty it"),)}
    reports = {
        node: NodeReport(node=node, checks=own, facts={}, computed={"cpu": {"tflops": 1.0}})
        for node, own in checks.items()
    }
    found = dataclasses.replace(smoke(tmp_path), found=reports, group=GroupReport(shares=shares))
    texts, exclude = bad(found)
    assert texts == ["node.tmp n2: full", "net.reduce n1: an all-reduce failed: timed out"]
    assert exclude == "n2"
