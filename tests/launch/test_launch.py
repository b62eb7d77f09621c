"""The arguments that each node hands to accelerate's launcher."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.spec import Strategy
from clusterrun.launch.accelerate_argv import launch_argv
from clusterrun.launch.plan import Plan
from clusterrun.shared.own_modules import RUN_MODULE
from tests.launch.samples import on_slurm


def argv(plan: Plan, **changes: Any) -> tuple[str, ...]:
    return launch_argv(
        plan,
        **{
            "python": "/usr/bin/python3",
            "config_file": "/runs/r/accelerate.yaml",
            "deepspeed_file": "",
            "machine_rank": 1,
            "address": "10.0.0.1",
            "port": 23456,
            "precision": "bf16",
            "worker_argv": plan.entry,
            **changes,
        },
    )


def test_the_whole_line_of_a_node() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=4, args=("--lr", "1e-4"), rendezvous_timeout_s=900)
    assert argv(plan) == (
        "--config_file",
        "/runs/r/accelerate.yaml",
        "--num_machines",
        "2",
        "--num_processes",
        "8",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.1",
        "--main_process_port",
        "23456",
        "--rdzv_backend",
        "static",
        "--rdzv_conf",
        "timeout=900",
        "--max_restarts",
        "0",
        "--monitor_interval",
        "3",
        "--gpu_ids",
        "all",
        "--mixed_precision",
        "bf16",
        *("--no_python", "/usr/bin/python3", "-c", RUN_MODULE, "clusterrun.rank.worker"),
        "train.py",
        "--lr",
        "1e-4",
    )


@pytest.mark.parametrize("strategy", [s for s in Strategy if s.is_deepspeed])
def test_deepspeed_is_told_to_use_this_launcher(strategy: Strategy) -> None:
    line = argv(on_slurm(nodes=2, gpus_per_node=1, strategy=strategy))
    assert line[line.index("--deepspeed_multinode_launcher") + 1] == "standard"
    assert "--deepspeed_config_file" not in line


def test_the_json_of_the_run_directory_is_named() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=1, strategy=Strategy.ZERO2)
    line = argv(plan, deepspeed_file="/runs/r/ds_config.json")
    assert line[line.index("--deepspeed_config_file") + 1] == "/runs/r/ds_config.json"


@pytest.mark.parametrize("precision", ["", "file"])
def test_a_precision_that_the_file_decides_is_no_flag(precision: str) -> None:
    assert "--mixed_precision" not in argv(on_slurm(gpus_per_node=1), precision=precision)


def test_one_process_on_a_cpu_is_told_so_for_the_launcher_overwrites_the_environment() -> None:
    assert "--cpu" in argv(on_slurm(strategy=Strategy.NONE))
    assert "--cpu" not in argv(on_slurm(nodes=2))  # would make it N worlds
