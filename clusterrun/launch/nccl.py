"""Choose the ranks' variables that the plan can decide, each with its reason.

`node/agent/environment.py` sets those that depend on the node or the attempt: NCCL_DEBUG_FILE, the
dump file of the flight recorder, *_SOCKET_IFNAME, cache directories, PET_RDZV_ID. Neither sets
those that hide faults or are tuned for one machine: NCCL_IB_DISABLE, NCCL_P2P_DISABLE,
NCCL_SHM_DISABLE, NCCL_ALGO, TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ASYNC_ERROR_HANDLING.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterrun.config.choices import Device, Network, Strategy
from clusterrun.launch.plan import EnvVar

if TYPE_CHECKING:
    from clusterrun.launch.world_shape import World

# New and old name; torch reads the new one from this version on (ProcessGroupNCCL.hpp,
# FlightRecorder.hpp). The old name still works then, with a warning.
_RENAMED: tuple[tuple[str, str, tuple[int, int]], ...] = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 9)),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 9)),
    ("TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK", (2, 9)),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", (2, 2)),
    ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", (2, 2)),
    ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG", (2, 2)),
    ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", (2, 2)),
)

_PRESETS = {
    Network.ETHERNET: EnvVar(
        name="NCCL_NET",
        value="Socket",
        why="--network ethernet: plain sockets, even if a node has an idle InfiniBand card",
    ),
    Network.INFINIBAND: EnvVar(
        name="NCCL_NET",
        value="IB",
        why="--network infiniband: fail if a node has none, rather than fall back to TCP",
    ),
    Network.EFA: EnvVar(
        name="FI_EFA_USE_HUGE_PAGE",
        value="0",
        why="--network efa: data loaders fork, and a fork cannot copy EFA's huge pages",
    ),
}


def spellings(name: str, torch: tuple[int, int] | None) -> tuple[str, ...]:
    """Return a variable's name for the installed torch; both names if torch is unknown.

    >>> spellings("TORCH_FR_BUFFER_SIZE", (2, 8))
    ('TORCH_NCCL_TRACE_BUFFER_SIZE',)
    >>> spellings("NCCL_BLOCKING_WAIT", None)
    ('TORCH_NCCL_BLOCKING_WAIT', 'NCCL_BLOCKING_WAIT')
    >>> spellings("NCCL_DEBUG", (2, 8))
    ('NCCL_DEBUG',)
    """
    for new, old, since in _RENAMED:
        if name in (new, old):
            if torch is None:
                return (new, old)
            return (new,) if torch >= since else (old,)
    return (name,)


def base_environment(
    *,
    world: World,
    strategy: Strategy,
    network: Network,
    torch: tuple[int, int] | None,
    threads: int,
    timeout_s: int,
) -> tuple[EnvVar, ...]:
    """Return the variables that the run needs; the user's are applied later.

    `threads` and `timeout_s` are 0 if unknown or not requested.
    """
    return (
        EnvVar(name="PYTHONFAULTHANDLER", value="1", why="stacks at SIGSEGV, SIGABRT and SIGBUS"),
        *_threads(threads),
        *(_for_gpus(network, torch) if world.device is Device.CUDA else ()),
        *(_for_cpus(strategy) if world.device is Device.CPU else ()),
        *_deepspeed_timeout(strategy, timeout_s),
    )


def _threads(threads: int) -> tuple[EnvVar, ...]:
    why = "the node's CPUs divided by its ranks; launchers default to 1"
    return (EnvVar(name="OMP_NUM_THREADS", value=str(threads), why=why),) if threads else ()


def _for_gpus(network: Network, torch: tuple[int, int] | None) -> tuple[EnvVar, ...]:
    recorder = "flight recorder: the last collectives of each rank, dumped when one times out"
    return (
        EnvVar(
            name="NCCL_DEBUG",
            value="WARN",
            why="prints only errors, including the cause of an 'unhandled system error'",
        ),
        *(
            EnvVar(name=name, value="2000", why=recorder)
            for name in spellings("TORCH_FR_BUFFER_SIZE", torch)
        ),
        EnvVar(name="TORCH_NCCL_DUMP_ON_TIMEOUT", value="1", why=recorder),
        *((_PRESETS[network],) if network in _PRESETS else ()),
    )


def _for_cpus(strategy: Strategy) -> tuple[EnvVar, ...]:
    hidden = EnvVar(
        name="CUDA_VISIBLE_DEVICES", value="", why="on the CPU, even if a node has GPUs"
    )
    if not strategy.is_deepspeed:
        why = "otherwise accelerate starts one world for each process"
        return (hidden, EnvVar(name="ACCELERATE_USE_CPU", value="true", why=why))
    return (
        hidden,
        # ACCELERATE_USE_CPU would silently make it DDP.
        EnvVar(name="ACCELERATE_TORCH_DEVICE", value="cpu", why="accelerate's device for ZeRO"),
        EnvVar(name="DS_ACCELERATOR", value="cpu", why="DeepSpeed's device"),
    )


def _deepspeed_timeout(strategy: Strategy, timeout_s: int) -> tuple[EnvVar, ...]:
    if not (strategy.is_deepspeed and timeout_s):
        return ()
    minutes = -(-timeout_s // 60)  # DeepSpeed reads whole minutes
    return (EnvVar(name="DEEPSPEED_TIMEOUT", value=str(minutes), why="--timeout, in minutes"),)


def respell(
    variables: Mapping[str, str], torch: tuple[int, int] | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the user's variables as the installed torch names them, and notes."""
    spelled: dict[str, str] = {}
    notes = []
    for name, value in variables.items():
        names = (name,) if torch is None else spellings(name, torch)
        if names != (name,):
            notes.append(
                f"{name} is exported as {names[0]}, the name that the installed torch reads"
            )
        spelled |= dict.fromkeys(names, value)
    return spelled, tuple(notes)


def overlay(base: tuple[EnvVar, ...], variables: Mapping[str, str], why: str) -> tuple[EnvVar, ...]:
    """Replace variables of `base` with the user's; each name appears once."""
    kept = tuple(variable for variable in base if variable.name not in variables)
    return kept + tuple(
        EnvVar(name=name, value=value, why=why) for name, value in variables.items()
    )
