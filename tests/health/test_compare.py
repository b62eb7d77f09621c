"""What differs between nodes is shown once, with the nodes that have the rare value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.health import compare
from clusterrun.health.compare import differences, merged, to_exclude
from clusterrun.health.facts import facts
from clusterrun.health.together import slow
from clusterrun.shared.finding import Finding, Severity, fail, note, ok, skip

MANY = [f"n{number:04}" for number in range(1000)]


def test_this_machine_agrees_with_itself() -> None:
    found = facts({"driver": "560.35"})
    checks = differences({"n1": found, "n2": found})
    assert {each.severity for each in checks} == {Severity.OK}
    assert {each.id for each in checks} == {f"same.{group}" for group in compare.HINTS}
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


def lines(checks: dict[str, list[Finding]]) -> list[str]:
    return [f"{each.severity.value} {each.id} {each.summary}" for each in merged(checks)]


def test_a_hint_names_all_nodes_of_a_finding() -> None:
    nodes = {f"n{n}": [note("net.link", "slow", f"--exclude n{n}, not an{n}")] for n in (1, 2)}
    assert [each.fix for each in merged(nodes)] == ["--exclude n[1-2], not an1"]


def test_each_finding_is_one_line_the_worst_first() -> None:
    small = [note("node.shm", f"only {size} MiB", f"use {size}") for size in (32, 64)]
    nodes = {
        "n1": [ok("node.shm", "fine"), fail("net.name", "n1 does not resolve", "hint")],
        "n2": [small[0], fail("net.name", "n2 does not resolve", "hint")],
        "n3": [small[1], ok("net.name", "fine")],
        "n4": [fail("node.shm", "gone", "mount it")],
    }
    assert lines(nodes) == [
        "fail node.shm n4: gone",
        "note node.shm n[2-3]: only 32 MiB (on n2)",
        "fail net.name n[1-2]: n1 does not resolve (on n1)",
        "skip net.name n4: the node did not report it",
    ]
    assert to_exclude(nodes) == "n[1-2,4]"


def test_a_failure_of_all_nodes_excludes_none() -> None:
    checks = [fail("path.disk", "full", "delete"), skip("node.ecc", "no GPU")]
    assert to_exclude({"n1": checks, "n2": checks}) == ""
    assert to_exclude({}) == ""


def test_the_checks_of_a_thousand_nodes_are_few_lines() -> None:
    texts = "abcdefghij"
    checks = [note("net.name", texts[number % 10] * 90, "hint") for number in range(1000)]
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
    assert slow({"n1": 100, "n2": 51}) == {}
    assert slow({"n1": 100, "n2": 49}) == {"n2": 0.49}
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
