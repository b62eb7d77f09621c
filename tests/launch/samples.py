"""Facts and plans that the tests start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterrun.config.choices import Cluster
from clusterrun.config.spec import JobSpec
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan

VERSIONS = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}


def slurm_facts(*, packages: Mapping[str, str] = VERSIONS, **changes: Any) -> Facts:
    """Describe a submission on a cluster."""
    return Facts(
        **{
            "cluster": Cluster.SLURM,
            "python": "/usr/bin/python3",
            "workdir": "/home/ada/project",
            "runs_dir": "/home/ada/project/runs",
            "interpreter": Interpreter(packages=packages),
            **changes,
        }
    )


def local_facts(**changes: Any) -> Facts:
    """Describe a submission on this machine: 8 CPUs and no GPU."""
    return slurm_facts(**{"cluster": Cluster.LOCAL, "local_cpus": 8, **changes})


def on_slurm(facts: Facts | None = None, /, **asked: Any) -> Plan:
    """Plan a job of train.py for a cluster."""
    return make_plan(JobSpec(**{"script": "train.py", **asked}), facts or slurm_facts())


def here(facts: Facts | None = None, /, **asked: Any) -> Plan:
    """Plan a job of train.py for this machine."""
    return make_plan(JobSpec(**{"script": "train.py", **asked}), facts or local_facts())


def lines(plan: Plan) -> dict[str, str | None]:
    """Read the directives of a plan by name."""
    return {line.name: line.value for line in plan.directives}


def variables(plan: Plan) -> dict[str, str]:
    """Read the exported variables of a plan by name."""
    return {variable.name: variable.value for variable in plan.env}


ZERO2_OFFLOAD: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
    },
}
