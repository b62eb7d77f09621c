"""What the nodes of a run found is judged, and the node at fault is the one that is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.health import examine, trial
from clusterrun.health.examine import differences, merged, to_exclude
from clusterrun.health.machine import facts
from clusterrun.health.trial import OF_ALL, NodeReport, compare_nodes, judge_nodes, slow
from clusterrun.shared.finding import BAD, Severity, fail, note, ok, skip
from clusterrun.shared.state import JobState
from clusterrun.verbs.doctor import Smoke, findings

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
    by_node = judge_nodes(NODES, found, met, [unstarted], said or {}, 12.3)
    present = {node: checks for node, checks in by_node.items() if node in found}
    reported = {node: checks[:1] for node, checks in by_node.items()}
    rows = [
        *merged(reported),
        *(each for each in merged(present) if each.id != "node.report"),
        *compare_nodes(NODES, found, met),
    ]
    assert [each for each in rows if bool(each.fix) != (each.severity in BAD)] == []
    own = {node: [c for c in checks if c.id != OF_ALL] for node, checks in by_node.items()}
    bad = [each for each in rows if each.severity is not Severity.OK]
    return [f"{each.severity.value} {each.id} {each.summary}" for each in bad], to_exclude(own)


def test_nothing_is_noted_on_healthy_nodes() -> None:
    assert lines() == ([], "")
    checks = judge_nodes(NODES, REPORTS, NODES, (), {}, 12.3)
    assert [each.id for each in checks["n1"]] == [
        *("node.report", "node.shm", "node.compute", "net.meet", "net.reduce")
    ]


# Nodes that do not report

SILENT = "no report within 12 s: the node is stuck or very busy, or the job does not start there"


@pytest.mark.parametrize(
    ("unstarted", "said", "has_met", "text", "hint"),
    [
        ("", "", False, SILENT, "look at the node: scontrol show node n2; leave the node out"),
        ("", "a setup line exited", False, "a setup line exited", "correct this, or leave the nod"),
        ("n2", "", False, "Slurm could not start the job's script on the", "look at the node: sc"),
        ("", "", True, "the node reached the first node, but its report", "set --run-dir to a dir"),
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
    checks = judge_nodes(NODES, found, met, [unstarted], {"n2": said}, 12.3)
    (report,) = (each for each in checks["n2"] if each.id == "node.report")
    assert report.fix.startswith(hint)
    own = judge_nodes(NODES, found, met, [unstarted], {"n2": said}, 12.3, has_slurm=False)["n2"]
    assert not any("scontrol" in each.fix for each in own)


def test_the_first_node_did_not_report() -> None:
    """The others could not meet; that is no fault of theirs."""
    found = {node: REPORTS[node] for node in NODES[1:]}
    bad, exclude = lines(found, None)
    assert bad == [f"fail node.report n1: {SILENT}", "skip net.meet no report from the first node"]
    assert exclude == "n1"


# Nodes that do not measure with the others, and what they compute

ERROR = {"error": "ImportError: libcudart.so.12"}
LATE = {"reduced_s": None, "reduce_error": "no answer within 15 s"}
GLOO = "RuntimeError: [/build/gloo/pair.cc:537] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    ("changed", "met", "said", "excluded"),
    [
        (
            {"n1": {"computed": {"cuda:0": ERROR}}}, None,
            ["fail node.compute n1: cuda:0: ImportError: libcudart.so.12",
             "skip net.meet torch does not start on the first node"], "n1",
        ),
        (
            {}, NODES[:3],
            ["skip net.meet n4: its ranks did not meet the others",
             "skip net.reduce n4: its ranks did not meet the others"], "",
        ),
        (
            {"n3": {"has_measured": False, "reduced_s": None}}, NODES,
            ["fail net.meet n3: the node met the others, then it stopped answering",
             "skip net.reduce n3: not measured"], "n3",
        ),
        (
            {"n4": {"computed": {"cuda:1": ERROR}, "reduced_s": None}}, NODES,
            ["fail node.compute n4: cuda:1: ImportError: libcudart.so.12",
             "skip net.reduce n4: not measured"], "n4",
        ),
        (
            {"n4": {"computed": None}}, NODES,
            ["fail node.compute n4: torch did not answer in time"], "n4",
        ),
        (
            {"n2": {"computed": {"cuda:0": {"tflops": 100.0}, "cuda:1": {"tflops": 50.0}}}}, NODES,
            ["note node.compute n2: a matrix product on 2 devices: 50 TFLOP/s, "
             "50% of the median of the other nodes"], "",
        ),
        (
            {"n1": LATE, "n2": LATE | {"reduce_error": GLOO}, "n3": LATE}, NODES,
            ["fail net.reduce n[1-3]: an all-reduce failed: Read error: "
             "Connection reset by peer"], "",
        ),
    ],
)  # fmt: skip
def test_a_node_that_does_not_measure_or_compute_as_the_others_do_is_named(
    changed: dict[str, Any], met: tuple[str, ...] | None, said: list[str], excluded: str
) -> None:
    assert lines(reports(**changed), met) == (said, excluded)


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
    blocked = dataclasses.replace(ended, end=None, blocked="the nodes are down")
    assert bad(blocked) == (["node.report job 7 does not start: the nodes are down"], "")


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


# What differs between nodes


MANY = [f"n{number:04}" for number in range(1000)]


def test_this_machine_agrees_with_itself() -> None:
    found = facts({"driver": "560.35"})
    checks = differences({"n1": found, "n2": found})
    assert {each.severity for each in checks} == {Severity.OK}
    assert {each.id for each in checks} == {f"same.{group}" for group in examine.HINTS}
    assert all(found.values())


SAME = {
    "versions.python": "3.11.4",
    "versions.torch": "2.6.0",
    "versions.NCCL": "2.27.5",
    "system.kernel": "6.1",
    "hardware.memory": "503.5 GiB",
    "gpu.driver": "560.35",
}


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("versions.python", "3.12.4", "fail", "python: n7 has 3.12.4, the other 15 have 3.11.4"),
        ("versions.python", "3.11.5", "note", "python: n7 has 3.11.5, the other 15 have 3.11.4"),
        ("versions.torch", "", "fail", "torch: n7 has none, the other 15 have 2.6.0"),
        ("versions.NCCL", "2.27.3", "fail", "NCCL: n7 has 2.27.3, the other 15 have 2.27.5"),
        ("system.kernel", "5.4", "note", "kernel: n7 has 5.4, the other 15 have 6.1"),
        ("hardware.memory", "250.0 GiB", "note", "memory: n7 has 250.0 GiB, the other 15 have "),
        ("hardware.memory", "503.4 GiB", "ok", "16 nodes agree: memory 503.5 GiB"),
        ("gpu.driver", "550.54", "note", "driver: n7 has 550.54, the other 15 have 560.35"),
        ("gpu.vbios", "96", "note", "vbios: n7 has 96, the other 15 have none"),
    ],
)
def test_one_node_differs(name: str, value: str, status: str, text: str) -> None:
    nodes = {f"n{number}": dict(SAME) for number in range(16)}
    nodes["n7"][name] = value
    found = {each.id: each for each in differences(nodes)}
    mine = found.pop(f"same.{name.split('.')[0]}")
    assert (mine.severity.value, bool(mine.fix)) == (status, status != "ok")
    assert mine.text.startswith(text)
    assert {each.severity for each in found.values()} == {Severity.OK}


def test_what_breaks_a_job_comes_first() -> None:
    nodes = {name: dict(SAME) for name in ("n1", "n2", "n3", "n4")}
    for name in ("n1", "n4"):
        nodes[name] |= {"versions.python": "3.11.9", "versions.torch": "2.5.1"}
    (found,) = (each for each in differences(nodes) if each.id == "same.versions")
    assert found.text == (
        "torch: n[1,4] have 2.5.1, the other 2 have 2.6.0; "
        "python: n[2-3] have 3.11.4, the other 2 have 3.11.9"
    )


# Checks of many nodes


def test_a_hint_names_all_nodes_of_a_finding() -> None:
    nodes = {f"n{n}": [note("net.link", "slow", f"--exclude n{n}, not an{n}")] for n in (1, 2)}
    assert [each.fix for each in merged(nodes)] == ["--exclude n[1-2], not an1"]


def test_each_finding_is_one_line_the_worst_first() -> None:
    small = [note("node.shm", f"only {size} MiB", f"use {size}") for size in (32, 64)]
    nodes = {
        "n1": [ok("node.shm", "fine"), fail("net.meet", "n1 does not resolve", "hint")],
        "n2": [small[0], fail("net.meet", "n2 does not resolve", "hint")],
        "n3": [small[1], ok("net.meet", "fine")],
        "n4": [fail("node.shm", "gone", "mount it")],
    }
    assert [f"{each.severity.value} {each.id} {each.summary}" for each in merged(nodes)] == [
        "fail node.shm n4: gone",
        "note node.shm n[2-3]: only 32 MiB (on n2)",
        "fail net.meet n[1-2]: n1 does not resolve (on n1)",
        "skip net.meet n4: the node did not report it",
    ]
    assert to_exclude(nodes) == "n[1-2,4]"


def test_a_failure_of_all_nodes_excludes_none() -> None:
    checks = [fail("path.disk", "full", "delete"), skip("node.ecc", "no GPU")]
    assert to_exclude({"n1": checks, "n2": checks}) == ""
    assert to_exclude({}) == ""


def test_the_checks_of_a_thousand_nodes_are_few_lines() -> None:
    texts = "abcdefghij"
    checks = [note("net.meet", texts[number % 10] * 90, "hint") for number in range(1000)]
    found = merged({node: [check] for node, check in zip(MANY, checks, strict=True)})
    assert len(found) == 5
    assert sum(len(each.nodes) for each in found) == 1000
    assert all(len(each.summary) < 250 for each in found)
    assert found[0].summary.startswith("100 nodes (n0000, n0010, n0020, ...): a")


# Numbers


def test_a_slow_node_is_named_with_its_share() -> None:
    rates = {f"n{number}": 100.0 + number for number in range(15)} | {"n15": 50.0, "n16": 20.0}
    assert list(slow(rates)) == ["n16", "n15"]
    assert slow(rates)["n16"] == pytest.approx(0.19, abs=0.01)
    assert slow({"n1": 100, "n2": 76}) == {}
    assert slow({"n1": 100, "n2": 74}) == {"n2": 0.74}
    assert slow({"n1": 100, "n2": math.nan}) == slow({"n1": 1}) == slow({}) == {}
    assert slow({"n1": 0, "n2": 0, "n3": 0}) == {}


@given(st.dictionaries(st.text(max_size=3), st.floats(0.0, 1e9), max_size=9))
def test_at_least_half_of_the_nodes_are_not_slow(values: dict[str, float]) -> None:
    found = slow(values)
    assert len(found) <= len(values) / 2
    assert all(share < 0.75 for share in found.values())
    assert slow(values, least=0.0) == {}
    if found:
        assert values[next(iter(found))] == min(values.values())
