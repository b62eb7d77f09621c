"""Build the arguments of `accelerate launch`."""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.config.choices import Device, Strategy
from clusterrun.launch.plan import LOOPBACK, Plan, Precision
from clusterrun.shared.own_modules import WORKER_MODULE, module_argv

# Seconds between the launcher's checks for failed ranks; it ends the others of its node. Agents
# notice a failure at once and give other ranks ALIKE_S (`node/link/connection.py`) to fail alike.
MONITOR_INTERVAL_S = 3
ADDRESS, PORT, RUN_DIR = "<address of node 0>", "<port>", "<run dir>"  # only a job knows them
PRECISION = "<bf16 or fp16>"


class NodeLaunch(NamedTuple):
    """What a node alone knows of a launch."""

    config_file: str
    deepspeed_file: str  # "": the run has none
    machine_rank: int
    address: str
    port: int | str
    precision: str  # `no`, `fp16`, `bf16` for all nodes; `file` or "": `config_file` decides


def launch_argv(plan: Plan, where: NodeLaunch, *, python: str) -> tuple[str, ...]:
    """Return the arguments for accelerate's `launch` parser; the interpreter runs the worker."""
    worker = module_argv(python, WORKER_MODULE, *plan.entry)
    return (*launch_options(plan, where), "--no_python", *worker)


def launch_options(plan: Plan, where: NodeLaunch) -> tuple[str, ...]:
    """Return the options of `accelerate launch`, without what it starts."""
    precision = where.precision
    return (
        *("--config_file", where.config_file),
        *("--num_machines", str(plan.nodes)),
        *("--num_processes", str(plan.world_size)),
        *("--machine_rank", str(where.machine_rank)),
        *("--main_process_ip", where.address),
        *("--main_process_port", str(where.port)),
        # Nodes keep the order that Slurm gave them; c10d would sort them and advertise getfqdn().
        *("--rdzv_backend", "static"),
        *("--rdzv_conf", f"timeout={plan.rendezvous_timeout_s}"),
        # A static rendezvous cannot be joined again: the job restarts, not the group.
        *("--max_restarts", "0"),
        *("--monitor_interval", str(MONITOR_INTERVAL_S)),
        # Ids in a user's file would override what the scheduler allocated.
        *("--gpu_ids", "all"),
        *(() if precision in ("", "file") else ("--mixed_precision", precision)),
        *_strategy_flags(plan, where.deepspeed_file),
    )


def shown_command(plan: Plan, node: int) -> tuple[str, ...]:
    """Return the `accelerate launch` command that is equivalent to the start of a node's ranks."""
    options = launch_options(plan, with_placeholders(plan, node))
    return ("accelerate", "launch", *options, *entry_words(plan))


def with_placeholders(plan: Plan, node: int) -> NodeLaunch:
    """Return what a node passes to `launch_options`; placeholders stand for what only it knows."""
    is_one_machine = plan.cluster.scheduler.is_this_machine or plan.nodes == 1
    return NodeLaunch(
        config_file=f"{RUN_DIR}/accelerate.yaml",
        deepspeed_file=f"{RUN_DIR}/ds_config.json" if plan.deepspeed else "",
        machine_rank=node,
        address=LOOPBACK if is_one_machine else ADDRESS,
        port=plan.main_process_port or PORT,
        precision=PRECISION if plan.precision is Precision.HEAD else plan.precision.value,
    )


def entry_words(plan: Plan) -> tuple[str, ...]:
    """Return what `accelerate launch` starts: the script or `--module`, with its arguments."""
    return ("--module", *plan.entry[1:]) if plan.entry[0] == "-m" else plan.entry


def _strategy_flags(plan: Plan, deepspeed_file: str) -> tuple[str, ...]:
    if plan.strategy.is_deepspeed:
        # accelerate's default launcher (pdsh) trains each node separately and exits 0.
        file = ("--deepspeed_config_file", deepspeed_file) if deepspeed_file else ()
        return ("--deepspeed_multinode_launcher", "standard", *file)
    if plan.strategy is Strategy.NONE and plan.device is Device.CPU:
        # accelerate's single-process launcher overwrites ACCELERATE_USE_CPU with this flag.
        return ("--cpu",)
    return ()
