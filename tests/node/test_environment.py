"""The environment of the ranks on one node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clusterrun.config.choices import Device, Strategy
from clusterrun.launch.plan import Plan
from clusterrun.node.agent import environment as module
from clusterrun.node.agent.environment import rank_environment
from clusterrun.node.base.identity import Attempt, Identity
from clusterrun.node.base.report import LaunchParameters
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import on_slurm
from tests.node.jobs import who

VERSIONS = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8"}
WHO = who(1, "n1", "n2", job_id="4711")
MET = LaunchParameters(address="10.0.0.1", port=21000, interface="ib0", precision="bf16")


@pytest.fixture(autouse=True)
def _node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_version", VERSIONS.__getitem__)
    monkeypatch.setattr(module, "allocated_cpus", lambda env: 16)


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
        "CLUSTERRUN_AGENT_PID": str(os.getpid()),
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


def test_traces_stay_on_the_node_in_the_installed_spelling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = environment()
    assert env["NCCL_DEBUG_FILE"] == "/tmp/spool/nccl.%h.%p"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "/tmp/spool/flight_rank_"
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in env
    monkeypatch.setitem(VERSIONS, "torch", "2.5.1")
    assert environment()["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/tmp/spool/flight_rank_"
