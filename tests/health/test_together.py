"""What the nodes of a run found is judged, and the node at fault is the one that is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health import trial
from clusterrun.health.compare import merged, to_exclude
from clusterrun.health.reports import NodeReport
from clusterrun.health.together import OF_ALL, of_group, of_nodes
from clusterrun.shared.finding import BAD, Finding, Severity, ok
from clusterrun.shared.state import JobState
from clusterrun.verbs.smoke import Smoke, findings

NODES = ("n1", "n2", "n3", "n4")
REPORTS = {
    node: NodeReport(
        node=node,
        checks=(ok("node.shm", "fine"),),
        facts={"versions.torch": "2.6.0"},
        computed={"cuda:0": {"tflops": 100.0}, "cuda:1": {"tflops": 100.0}},
        has_measured=True,
        reduced_s=0.02,
    )
    for node in NODES
}


def reports(**changed: Mapping[str, Any]) -> dict[str, NodeReport]:
    return {
        node: dataclasses.replace(report, **changed.get(node, {}))
        for node, report in REPORTS.items()
    }


def lines(
    found: Mapping[str, NodeReport] | None = None,
    met: tuple[str, ...] | None = NODES,
    unstarted: str = "",
    said: Mapping[str, str] | None = None,
) -> tuple[list[str], str]:
    """Return what is noted, failed and skipped, and the nodes to leave out."""
    found = REPORTS if found is None else found
    by_node = of_nodes(NODES, found, met, [unstarted], said or {}, 12.3)
    present = {node: checks for node, checks in by_node.items() if node in found}
    reported = {node: checks[:1] for node, checks in by_node.items()}
    rows = [
        *merged(reported),
        *(each for each in merged(present) if each.id != "node.report"),
        *of_group(NODES, found, met),
    ]
    assert [each for each in rows if bool(each.fix) != (each.severity in BAD)] == []
    own = {node: [c for c in checks if c.id != OF_ALL] for node, checks in by_node.items()}
    bad = [each for each in rows if each.severity is not Severity.OK]
    return [f"{each.severity.value} {each.id} {each.summary}" for each in bad], to_exclude(own)


def hint_of(name: str, checks: Mapping[str, list[Finding]], node: str) -> str:
    (found,) = (each for each in checks[node] if each.id == name)
    return found.fix


def test_nothing_is_noted_on_healthy_nodes() -> None:
    assert lines() == ([], "")
    checks = of_nodes(NODES, REPORTS, NODES, (), {}, 12.3)
    assert [each.id for each in checks["n1"]] == [
        *("node.report", "node.shm", "node.compute", "net.meet", "net.reduce")
    ]


# Nodes that do not report

SILENT = "no report within 12 s: it is stuck or very busy, or the job does not start there"


@pytest.mark.parametrize(
    ("unstarted", "said", "has_met", "text", "hint"),
    [
        ("", "", False, SILENT, "look at it with: scontrol show node n2; leave it out with --ex"),
        ("", "a setup line exited", False, "a setup line exited", "mend that, or leave it out wi"),
        ("n2", "", False, "Slurm could not start the job's script there", "look at it with: scon"),
        ("", "", True, "no report, but it answered the first node: what", "choose a directory"),
    ],
)
def test_a_node_without_report(
    unstarted: str, said: str, has_met: bool, text: str, hint: str
) -> None:
    found = {node: report for node, report in REPORTS.items() if node != "n2"}
    met = NODES if has_met else tuple(found)
    bad, exclude = lines(found, met, unstarted, {"n2": said})
    assert len(bad) == 1
    assert bad[0].startswith(f"fail node.report n2: {text}")
    assert exclude == "n2"
    checks = of_nodes(NODES, found, met, [unstarted], {"n2": said}, 12.3)
    assert hint_of("node.report", checks, "n2").startswith(hint)


def test_the_first_node_did_not_report() -> None:
    """The others could not meet; that is no fault of theirs."""
    found = {node: REPORTS[node] for node in NODES[1:]}
    bad, exclude = lines(found, None)
    assert bad == [
        f"fail node.report n1: {SILENT}",
        "skip net.meet no report from the first node",
    ]
    assert exclude == "n1"


def test_torch_does_not_start_on_the_first_node() -> None:
    found = reports(n1={"computed": {"cuda:0": {"error": "ImportError: libcudart.so.12"}}})
    assert lines(found, None) == (
        [
            "fail node.compute n1: cuda:0: ImportError: libcudart.so.12",
            "skip net.meet torch does not start on the first node",
        ],
        "n1",
    )


# Nodes that do not measure with the others


def test_a_node_that_did_not_meet_the_others() -> None:
    bad, left_out = lines(met=NODES[:3])
    assert left_out == ""
    assert bad == [
        f"skip {name} n4: its ranks did not meet the others" for name in ("net.meet", "net.reduce")
    ]


def test_a_node_that_was_lost_while_all_measured() -> None:
    bad, exclude = lines(reports(n3={"has_measured": False, "reduced_s": None}))
    assert bad == [
        "fail net.meet n3: it met the others, then it stopped answering",
        "skip net.reduce n3: not measured",
    ]
    assert exclude == "n3"


# What they compute


def test_torch_that_does_not_start_on_one_node() -> None:
    error = {"cuda:1": {"error": "ImportError: libcudart.so.12"}}
    bad, exclude = lines(reports(n4={"computed": error, "reduced_s": None}))
    assert bad == [
        "fail node.compute n4: cuda:1: ImportError: libcudart.so.12",
        "skip net.reduce n4: its matrix product failed",
    ]
    assert exclude == "n4"
    bad, _ = lines(reports(n4={"computed": None}))
    assert bad == ["fail node.compute n4: torch did not answer in time"]


def test_a_slow_gpu_is_compared_with_the_other_nodes() -> None:
    slow = {"cuda:0": {"tflops": 100.0}, "cuda:1": {"tflops": 50.0}}
    bad, exclude = lines(reports(n2={"computed": slow}))
    assert bad == [
        "note node.compute n2: a matrix product on 2 devices: 50 TFLOP/s, "
        "50% of the median of the other nodes"
    ]
    assert exclude == ""


def test_an_all_reduce_that_fails_is_one_finding_and_leaves_out_no_node() -> None:
    late = {"reduced_s": None, "reduce_error": "no answer within 15 s"}
    gloo = "RuntimeError: [/build/gloo/pair.cc:537] Read error: Connection reset by peer"
    bad, exclude = lines(reports(n1=late, n2={"reduced_s": None, "reduce_error": gloo}, n3=late))
    text = "an all-reduce failed: Read error: Connection reset by peer"
    assert bad == [f"fail net.reduce n[1-3]: {text}"]
    assert exclude == ""


# What `doctor --nodes` concludes from a run


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
    report = dataclasses.replace(REPORTS["n1"], facts={})
    printed = "clusterrun: n1: old\nclusterrun: n2: no module\nclusterrun: n2: no python\n"
    found = dataclasses.replace(smoke(tmp_path, printed), found={"n1": report}, met=("n1",))
    assert bad(found) == (["node.report n2: no python"], "n2")


# What a rank computes


@pytest.mark.torch
def test_the_rate_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(trial, "CPU_S", 0.02)
    assert 0 < trial.matmul_rate("cpu") < 1000
    monkeypatch.setattr(torch, "randn", lambda *size, **kind: torch.full(size, 1e30, **kind))
    with pytest.raises(RuntimeError, match="not finite"):
        trial.matmul_rate("cpu")
