"""Decide the environment of a job: our variables, the preset's, then the user's.

`node/agent/environment.py` sets those that depend on the node or the attempt: NCCL_DEBUG_FILE, the
dump file of the flight recorder, *_SOCKET_IFNAME, cache directories, PET_RDZV_ID. Neither sets
those that hide faults or are tuned for one machine: NCCL_IB_DISABLE, NCCL_P2P_DISABLE,
NCCL_SHM_DISABLE, NCCL_ALGO, TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ASYNC_ERROR_HANDLING.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from clusterrun.config.choices import Device, Network, Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.plan import EnvVar

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec
    from clusterrun.launch.facts import Facts
    from clusterrun.launch.world_shape import World

Variable = tuple[str, str, str]
"""A name, a value, and the reason for it."""

# The names that torch reads from 2.9 on (FlightRecorder.hpp), and the old ones. An old name still
# works then, with a warning.
_OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}

_PRESETS: dict[Network, Variable] = {
    Network.ETHERNET: ("NCCL_NET", "Socket", "plain sockets, even beside an idle InfiniBand card"),
    Network.INFINIBAND: ("NCCL_NET", "IB", "fail if a node has none, rather than fall back to TCP"),
    Network.EFA: ("FI_EFA_USE_HUGE_PAGE", "0", "a data loader's fork cannot copy EFA's huge pages"),
}


def decide_environment(
    spec: JobSpec, facts: Facts, world: World, strategy: Strategy, threads: int
) -> tuple[EnvVar, ...]:
    """Choose the variables that do not depend on the node.

    Each name appears once; the user's come last. `threads` is 0 if unknown. Raises UsageError for
    invalid ones.
    """
    check_variables(spec)
    given = {name: (name, text, "yours (network.env)") for name, text in spec.network_env.items()}
    given |= {name: (name, text, "yours (env)") for name, text in spec.env.items()}
    # A user's old name also keeps out the new one of the same setting.
    taken = {*given, *(new for new, old in _OLD_NAMES.items() if old in given)}
    torch = facts.interpreter.version_of("torch")
    defaults = _default_variables(spec, world, strategy, torch, threads)
    rows = (*(row for row in defaults if row[0] not in taken), *given.values())
    return tuple(EnvVar(name=name, value=value, why=why) for name, value, why in rows)


def spellings(name: str, torch: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the name of a flight-recorder variable for this torch; both names if it is unknown.

    >>> spellings("TORCH_FR_BUFFER_SIZE", (2, 8))
    ('TORCH_NCCL_TRACE_BUFFER_SIZE',)
    """
    if torch is None:
        return (name, _OLD_NAMES[name])
    return (name,) if torch >= (2, 9) else (_OLD_NAMES[name],)


def _default_variables(
    spec: JobSpec, world: World, strategy: Strategy, torch: tuple[int, int] | None, threads: int
) -> Iterator[Variable]:
    """Yield what is set unless the user sets it; if `threads` is 0, each node decides."""
    yield "PYTHONFAULTHANDLER", "1", "stacks at SIGSEGV, SIGABRT and SIGBUS"
    if threads:
        why = "the node's CPUs divided by its ranks; launchers default to 1"
        yield "OMP_NUM_THREADS", str(threads), why
    if world.device is Device.CUDA:
        errors = "prints only errors, including the cause of an 'unhandled system error'"
        yield "NCCL_DEBUG", "WARN", errors
        recorder = "flight recorder: the last collectives of each rank, dumped when one times out"
        for name in spellings("TORCH_FR_BUFFER_SIZE", torch):
            yield name, "2000", recorder
        yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", recorder
        if spec.network in _PRESETS:
            name, value, why = _PRESETS[spec.network]
            yield name, value, f"network.preset {spec.network.value}: {why}"
    if world.device is Device.CPU:
        yield "CUDA_VISIBLE_DEVICES", "", "on the CPU, even if a node has GPUs"
        if strategy.is_deepspeed:  # ACCELERATE_USE_CPU would silently make ZeRO DDP
            yield "ACCELERATE_TORCH_DEVICE", "cpu", "accelerate's device for ZeRO"
            yield "DS_ACCELERATOR", "cpu", "DeepSpeed's device"
        else:
            why = "otherwise accelerate starts one world for each process"
            yield "ACCELERATE_USE_CPU", "true", why
    if strategy.is_deepspeed and spec.timeout_s:
        minutes = math.ceil(spec.timeout_s / 60)  # DeepSpeed reads whole minutes
        yield "DEEPSPEED_TIMEOUT", str(minutes), "--timeout, in minutes"
    if spec.planned:
        accumulation, why = str(spec.accumulation or 1), "planned: clusterrun.runtime.planned()"
        yield "CLUSTERRUN_MICRO_BATCH", str(spec.micro_batch or 1), why
        yield "CLUSTERRUN_ACCUMULATION", accumulation, why
        yield "CLUSTERRUN_GRAD_CKPT", "1" if spec.grad_ckpt else "0", why
        yield "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", accumulation, why  # accelerate reads it


# The node decides a rank's identity, its rendezvous and its GPU.
_NODE_DECIDES = (
    r"(?:LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME"
    r"|MASTER_(?:ADDR|PORT)|CUDA_VISIBLE_DEVICES|(?:PET|TORCHELASTIC|CLUSTERRUN)_.*"
    r"|SLURM_(?:NODEID|PROCID|LOCALID|JOB_?ID|(?:JOB_|STEP_)?NODELIST|RESTART_COUNT)"
    r"|SLURMD_NODENAME"
)

# Unset by env.sh: variables left by another launcher would change a rank's identity.
_UNSET_FIRST = (
    r"(?:ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM|PMIX?|OMPI_COMM|MV2_COMM)_.*"
    r"|MPI_LOCAL(?:RANKID|NRANKS)"
)


def check_variables(spec: JobSpec) -> None:
    """Refuse variables that would break the launch. Raises UsageError."""
    for name, value in (*spec.network_env.items(), *spec.env.items()):
        _refuse_owned(name)
        _refuse_harmful(name, value)
    for name in spec.pass_env:
        _refuse_owned(name)
        if re.fullmatch(_UNSET_FIRST, name):
            text = f"{name} looks left over from another launcher and is unset on the nodes"
            raise UsageError(text, hint=f"keep it with --env {name}=VALUE")
        if name in spec.env or name in spec.network_env:
            raise UsageError(f"{name} is both set and passed from your shell", hint="choose one")


def _refuse_owned(name: str) -> None:
    if re.fullmatch(_NODE_DECIDES, name):
        hint = f"leave out {name}: its value follows from the job"
        if name == "CUDA_VISIBLE_DEVICES":
            hint = "pass --gpu-ids on this machine; on a cluster, Slurm chooses the GPUs"
        raise UsageError(f"{name} can't be set: clusterrun sets it on each node", hint=hint)


def _refuse_harmful(name: str, value: str) -> None:
    if re.fullmatch("E?UID|PPID|SHELLOPTS|BASHOPTS|BASH_VERSINFO", name):
        raise UsageError(f"bash does not let {name} be set", hint="leave it out")
    if re.fullmatch("(TORCH_)?NCCL_ASYNC_ERROR_HANDLING", name) and value == "0":
        text = f"{name}=0 turns a crash of one rank into a hang of all ranks"
        raise UsageError(text, hint="leave it out: by default torch ends the job")
    is_exclusion = name.endswith("_SOCKET_IFNAME") and value.startswith("^")
    if is_exclusion and "lo" not in value[1:].split(","):
        text = f"{name}={value} does not exclude the loopback interface"
        raise UsageError(text, hint=f"write ^lo,{value[1:]}")
