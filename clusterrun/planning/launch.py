"""The arguments of `accelerate launch` on one node: the machine facts beat the file."""

from __future__ import annotations

from collections.abc import Sequence

from clusterrun.planning.plan import Plan
from clusterrun.spec import Device, Strategy

WORKER_MODULE = "clusterrun.worker"


def launch_argv(
    plan: Plan,
    *,
    config_file: str,
    deepspeed_file: str,
    machine_rank: int,
    address: str,
    port: int,
    precision: str,
    worker_argv: Sequence[str],
) -> tuple[str, ...]:
    """Name the arguments for accelerate's `launch` parser, ending in the worker and its arguments.

    `precision` is what the head published (`no`, `fp16`, `bf16`); `file` or an empty text leaves
    it to the configuration file. `deepspeed_file` is empty where the run has none. `worker_argv`
    follows `--module clusterrun.worker`, usually `plan.entry`.
    """
    return (
        *("--config_file", config_file),
        *_machine_facts(plan, machine_rank, address, port),
        *_precision(precision),
        *_strategy_flags(plan, deepspeed_file),
        *("--module", WORKER_MODULE, *worker_argv),
    )


def _machine_facts(plan: Plan, machine_rank: int, address: str, port: int) -> tuple[str, ...]:
    return (
        *("--num_machines", str(plan.nodes)),
        *("--num_processes", str(plan.world_size)),
        *("--machine_rank", str(machine_rank)),
        *("--main_process_ip", address),
        *("--main_process_port", str(port)),
        # Nodes keep the order that Slurm gave them; c10d would sort them and advertise getfqdn().
        *("--rdzv_backend", "static"),
        *("--rdzv_conf", f"timeout={plan.rendezvous_timeout_s}"),
        # A static rendezvous cannot be joined again: the job restarts, not the group.
        *("--max_restarts", "0"),
        # Ids in a user's file would override what the scheduler allocated.
        *("--gpu_ids", "all"),
    )


def _precision(precision: str) -> tuple[str, ...]:
    return () if precision in ("", "file") else ("--mixed_precision", precision)


def _strategy_flags(plan: Plan, deepspeed_file: str) -> tuple[str, ...]:
    if plan.strategy.is_deepspeed:
        # accelerate's default launcher (pdsh) trains each node alone and exits 0.
        launcher = ("--deepspeed_multinode_launcher", "standard")
        return (*launcher, *(("--deepspeed_config_file", deepspeed_file) if deepspeed_file else ()))
    if plan.strategy is Strategy.NONE and plan.device is Device.CPU:
        # Its launcher for one process overwrites ACCELERATE_USE_CPU with what it was told.
        return ("--cpu",)
    return ()
