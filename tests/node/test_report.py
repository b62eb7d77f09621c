"""What the head concludes from what the nodes say of themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clusterrun.node.base.report import Report, problems
from clusterrun.shared.typed import decoded

VERSIONS = {"python": "3.11", "torch": "2.13.0"}


def report(rank: int, **changes: Any) -> Report:
    return Report(**{**{"node": f"n{rank}", "node_rank": rank, "versions": VERSIONS}, **changes})


def test_equal_nodes_have_no_problem() -> None:
    assert problems([report(0), report(1)]) == []


def test_each_difference_names_versions_and_nodes() -> None:
    reports = [report(0), report(1, versions={"python": "3.11"})]
    reports += [report(2, problem="no room"), report(3, problem="no room")]
    assert problems(reports) == [
        "n[2-3]: no room",
        "versions differ between nodes: torch: n1 has none, the other 3 have 2.13.0",
    ]


def test_reports_survive_the_wire() -> None:
    one = report(1, capabilities=((9, 0), (8, 0)), problem="x")
    assert decoded(Report, dataclasses.asdict(one)) == one
    with pytest.raises(ValueError, match="shorter"):
        decoded(Report, {**dataclasses.asdict(one), "capabilities": [[9]]})


def test_a_node_computes_in_bf16_if_all_its_gpus_do() -> None:
    assert report(0, capabilities=((9, 0),)).has_bf16
    assert not report(1, capabilities=((9, 0), (7, 5))).has_bf16
    assert not report(2).has_bf16
