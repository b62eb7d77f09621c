"""What nodes report before the launch, and what the head decides for all."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Device, MixedPrecision, Strategy
from clusterrun.health.gpu_answer import GpuAnswer
from clusterrun.node.agent import preparation
from clusterrun.node.agent.preparation import (
    check_descriptors,
    gpu_problem,
    missing_packages,
    rendezvous_port,
)
from clusterrun.node.base.causes import NodeError
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.report import Report, problems
from clusterrun.node.conductor.leader import decided_precision
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import on_slurm
from tests.node.jobs import who

H100, A100, T4 = (9, 0), (8, 0), (7, 5)


def attempt(nodes: int = 2, **asked: Any) -> Attempt:
    head = who(0, *(f"n{rank}" for rank in range(nodes)))
    plan = on_slurm(nodes=nodes, gpus_per_node=2, **asked)
    return Attempt(plan=plan, paths=RunPaths(root=Path("/runs/job/r1")), number=1, who=head)


def reports(*gpus: tuple[int, int]) -> list[Report]:
    return [
        Report(node=f"n{rank}", node_rank=rank, versions={}, capabilities=(capability,) * 2)
        for rank, capability in enumerate(gpus)
    ]


@pytest.mark.parametrize(
    ("strategy", "missing", "text"),
    [
        ("ddp", (), ""),
        ("ddp", ("deepspeed",), ""),
        ("ddp", ("torch", "accelerate"), f"{sys.executable} has no torch or accelerate; install"),
        ("zero2", ("deepspeed",), f"{sys.executable} has no deepspeed; install clusterrun[train]"),
    ],
)
def test_packages_that_the_launch_needs_are_missed_by_name(
    monkeypatch: pytest.MonkeyPatch, strategy: str, missing: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(preparation, "own_version", lambda name: "" if name in missing else "1.0")
    found = missing_packages(attempt(strategy=Strategy(strategy)).plan)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def precision(*capabilities: tuple[int, int], **asked: Any) -> str:
    return decided_precision(attempt(**asked).plan.precision, reports(*capabilities))


def test_the_first_nodes_gpus_decide_the_precision_for_all_unless_the_user_has() -> None:
    assert precision(H100, A100) == "bf16"
    assert precision(T4, H100) == "fp16"
    assert precision(T4, T4, mixed_precision=MixedPrecision.BF16) == "bf16"
    assert precision(H100, device=Device.CPU) == "no"
    mixed = [dataclasses.replace(each, capabilities=(H100, T4)) for each in reports(H100)]
    unread = [dataclasses.replace(each, capabilities=()) for each in reports(H100)]
    for found, text in (
        (reports(H100, T4), "the GPUs of n1 do not support"),
        ([*reports(H100), dataclasses.replace(*mixed, node="n1")], "the GPUs of n1 do not support"),
        (unread, "; set --mixed-precision"),
    ):
        with pytest.raises(NodeError, match=text) as caught:
            decided_precision(attempt().plan.precision, found)
        assert caught.value.code == 122


def test_a_port_of_the_users_choice_is_taken_or_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, match=f"n0: port {port}: no port is free") as caught:
            rendezvous_port(attempt(main_process_port=port))
    assert caught.value.code == 121
    assert rendezvous_port(attempt(main_process_port=port)) == port
    assert 23450 <= rendezvous_port(attempt(port_range="23450-23453")) <= 23453


def test_gpus_are_counted_against_the_ranks() -> None:
    for variable, many, few in (
        ("CUDA_VISIBLE_DEVICES", "0,1", "0"),
        ("SLURM_GPUS_ON_NODE", "8", "1"),
    ):
        assert gpu_problem(attempt().plan, {variable: many}, GpuAnswer()) == ""
        problem = gpu_problem(attempt().plan, {variable: few}, GpuAnswer())
        assert problem == "only 1 GPU for 2 ranks; each rank needs one"


def test_equal_job_ids_of_two_projects_do_not_want_the_same_port() -> None:
    """Each directory of runs counts its own jobs on this machine: L1, L2, …"""
    here = attempt()
    there = dataclasses.replace(here, paths=RunPaths(root=Path("/elsewhere/job/r2")))
    assert rendezvous_port(here) != rendezvous_port(there)


def test_a_first_node_that_may_not_open_enough_files_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterrun.node.agent.preparation.raise_descriptor_limit", lambda: 3999)
    check_descriptors(attempt(nodes=1900))
    with pytest.raises(NodeError) as caught:
        check_descriptors(attempt(nodes=2000))
    assert caught.value.code == 122
    assert caught.value.message == (
        "n0: 4000 ranks need 4000 open files in one process; ulimit -Hn is 3999"
    )


VERSIONS = {"python": "3.11", "torch": "2.13.0"}


def report(rank: int, **changes: Any) -> Report:
    return Report(**{**{"node": f"n{rank}", "node_rank": rank, "versions": VERSIONS}, **changes})


def test_each_difference_names_versions_and_nodes() -> None:
    assert problems([report(0), report(1)]) == []
    reports = [report(0), report(1, versions={"python": "3.11"})]
    reports += [report(2, problem="no room"), report(3, problem="no room")]
    assert problems(reports) == [
        "n[2-3]: no room",
        "versions differ between nodes: torch: n1 has none, the other 3 have 2.13.0",
    ]
