"""What nodes report before the launch, and what the head decides for all."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Device, MixedPrecision, Strategy
from clusterrun.launch.plan import Plan
from clusterrun.node.agent import environment as module
from clusterrun.node.agent.environment import rank_environment
from clusterrun.node.agent.launcher import rendezvous_port
from clusterrun.node.base.causes import NodeError
from clusterrun.node.base.identity import Attempt, Identity
from clusterrun.node.conductor.leader import decided_precision, problems
from clusterrun.node.link.connection import LaunchParameters, Report
from clusterrun.node.watch import preflight
from clusterrun.node.watch.preflight import check_descriptors, missing_packages
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
    monkeypatch.setattr(preflight, "own_version", lambda name: "" if name in missing else "1.0")
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
        with pytest.raises(NodeError, match=f"n0: port {port} is not free for") as caught:
            rendezvous_port(attempt(main_process_port=port))
    assert caught.value.code == 121
    assert rendezvous_port(attempt(main_process_port=port)) == port
    assert 23450 <= rendezvous_port(attempt(port_range="23450-23453")) <= 23453


def test_equal_job_ids_of_two_projects_do_not_want_the_same_port() -> None:
    """Each directory of runs counts its own jobs on this machine: L1, L2, …"""
    here = attempt()
    there = here._replace(paths=RunPaths(root=Path("/elsewhere/job/r2")))
    assert rendezvous_port(here) != rendezvous_port(there)


def test_a_first_node_that_may_not_open_enough_files_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterrun.node.watch.preflight.raise_descriptor_limit", lambda: 3999)
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


# The environment of the ranks on one node


INSTALLED = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8"}
WHO = who(1, "n1", "n2", job_id="4711")
MET = LaunchParameters(address="10.0.0.1", port=21000, interface="ib0", precision="bf16")


@pytest.fixture(autouse=True)
def _node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_version", INSTALLED.__getitem__)
    monkeypatch.setattr("clusterrun.node.base.processes.allocated_cpus", lambda env: 16)


def environment(
    base: dict[str, str] | None = None,
    plan: Plan | None = None,
    own: Identity = WHO,
    parameters: LaunchParameters = MET,
) -> dict[str, str]:
    plan = plan or on_slurm(nodes=2, gpus_per_node=4)
    attempt = Attempt(plan=plan, paths=RunPaths(root=Path("/runs/job/r1")), number=2, who=own)
    return rank_environment(base or {}, attempt, parameters, Path("/tmp/spool"))


def test_the_contract_of_a_rank() -> None:
    cpu = on_slurm(nodes=2, gpus_per_node=2, device=Device.CPU, strategy=Strategy.ZERO2)
    assert environment(plan=cpu)["CLUSTERRUN_BACKEND"] == "gloo"
    env = environment(plan=on_slurm(nodes=2, gpus_per_node=4, timeout_s=1800))
    assert env["PET_RDZV_ID"] == "4711-2"
    one = environment(plan=on_slurm(nodes=1, nproc_per_node=1, device=Device.CPU))  # as torchrun
    assert (one["RANK"], one["WORLD_SIZE"], one["MASTER_PORT"]) == ("0", "1", "21000")
    assert {name: text for name, text in env.items() if name.startswith("CLUSTERRUN_")} == {
        "CLUSTERRUN_RUN_DIR": "/runs/job/r1",
        "CLUSTERRUN_ATTEMPT": "2",
        "CLUSTERRUN_JOB_ID": "4711",
        "CLUSTERRUN_NODE": "n2",
        "CLUSTERRUN_SPOOL": "/tmp/spool",
        "CLUSTERRUN_WORLD_SIZE": "8",
        "CLUSTERRUN_LOCAL_WORLD_SIZE": "4",
        "CLUSTERRUN_WORLD_CONTRACT": "1",
        "CLUSTERRUN_TRAINER_RESUME": "1",
        "CLUSTERRUN_TIMEOUT_S": "1800",
        "CLUSTERRUN_BACKEND": "",
        "CLUSTERRUN_ENGINE": "ddp",
        "CLUSTERRUN_CHECKPOINT_DIR": "/runs/job/r1/checkpoints",
    }


def test_an_interface_of_the_users_choice_stays() -> None:
    env = environment()
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("ib0", "ib0")  # the link's
    env = environment({"NCCL_SOCKET_IFNAME": "^lo,docker"})
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("^lo,docker", "ib0")
    plan = on_slurm(nodes=2, gpus_per_node=4, network_interface="hsn0")
    assert environment(plan=plan)["GLOO_SOCKET_IFNAME"] == "hsn0"


def test_one_node_leaves_nccl_alone() -> None:
    met = LaunchParameters(address="127.0.0.1", port=21000, interface="lo", precision="no")
    env = environment(own=who(0, "n1"), parameters=met)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in env


@pytest.mark.parametrize("cpus_per_task", [None, 16])
def test_the_threads_of_a_login_shell_lose_whether_the_cpus_are_known_or_not(
    cpus_per_task: int | None,
) -> None:
    plan = on_slurm(nodes=2, gpus_per_node=4, cpus_per_task=cpus_per_task)
    shell = {"OMP_NUM_THREADS": "1"}
    exported = {variable.name: variable.value for variable in plan.env}
    assert environment({**shell, **exported}, plan)["OMP_NUM_THREADS"] == "4"
    asked = on_slurm(nodes=2, gpus_per_node=4, env={"OMP_NUM_THREADS": "7"})
    exported = {variable.name: variable.value for variable in asked.env}
    assert environment({**shell, **exported}, asked)["OMP_NUM_THREADS"] == "7"


def test_caches_are_the_jobs_but_for_what_takes_long_to_build() -> None:
    env = environment({"TRITON_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/ada"})
    assert env["TRITON_CACHE_DIR"] == "/mine"
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/spool/")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    kept = f"/ada/clusterrun/torch_extensions/{python}-torch2.13.0+cpu-deepspeed0.19.8"
    assert env["TORCH_EXTENSIONS_DIR"] == kept


def test_traces_stay_on_the_node_in_the_installed_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment()
    assert env["NCCL_DEBUG_FILE"] == "/tmp/spool/nccl.%h.%p"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "/tmp/spool/flight_rank_"
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in env
    monkeypatch.setitem(INSTALLED, "torch", "2.5.1")
    assert environment()["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/tmp/spool/flight_rank_"
