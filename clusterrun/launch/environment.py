"""Decide the environment of a job: our variables, the preset's, then the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from clusterrun.config.choices import Device, Network, Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts, version_of
from clusterrun.launch.plan import EnvVar

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec
    from clusterrun.launch.world_shape import World


class JobEnvironment(NamedTuple):
    """The exported variables, and the process-group timeout in seconds (0: torch's default)."""

    variables: tuple[EnvVar, ...]
    timeout_s: int
    notes: tuple[str, ...]


def decide_environment(
    spec: JobSpec, facts: Facts, *, world: World, strategy: Strategy, threads: int
) -> JobEnvironment:
    """Choose the variables that do not depend on the node. Raises UsageError for invalid ones."""
    check_variables(spec)
    timeout_s = spec.timeout_s or 0
    torch = version_of(facts, "torch")
    network_env, network_notes = respell(spec.network_env, torch)
    env, env_notes = respell(spec.env, torch)
    base = base_environment(
        world=world,
        strategy=strategy,
        network=spec.network,
        torch=torch,
        threads=threads,
        timeout_s=timeout_s,
    )
    base += _planned(spec)
    return JobEnvironment(
        variables=overlay(overlay(base, network_env, "yours (network.env)"), env, "yours (env)"),
        timeout_s=timeout_s,
        notes=(*network_notes, *env_notes),
    )


def _planned(spec: JobSpec) -> tuple[EnvVar, ...]:
    """Return the planned batch as variables; accelerate reads the accumulation."""
    if not spec.planned:
        return ()
    accumulation = str(spec.accumulation or 1)
    values = {
        "CLUSTERRUN_MICRO_BATCH": str(spec.micro_batch or 1),
        "CLUSTERRUN_ACCUMULATION": accumulation,
        "CLUSTERRUN_GRAD_CKPT": "1" if spec.grad_ckpt else "0",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": accumulation,
    }
    why = "planned: clusterrun.runtime.planned()"
    return tuple(EnvVar(name=name, value=value, why=why) for name, value in values.items())


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
        why="network.preset ethernet: plain sockets, even if a node has an idle InfiniBand card",
    ),
    Network.INFINIBAND: EnvVar(
        name="NCCL_NET",
        value="IB",
        why="network.preset infiniband: fail if a node has none, rather than fall back to TCP",
    ),
    Network.EFA: EnvVar(
        name="FI_EFA_USE_HUGE_PAGE",
        value="0",
        why="network.preset efa: data loaders fork, and a fork cannot copy EFA's huge pages",
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

# Read-only, computed or executed by bash (man bash, "Shell Variables").
_BASH_KEEPS = (
    r"_|BASH.*|DIRSTACK|ENV|EPOCH(?:REALTIME|SECONDS)|E?UID|FUNCNAME|GROUPS|HISTCMD|IFS|LINENO"
    r"|OPT(?:ARG|ERR|IND)|PIPESTATUS|POSIXLY_CORRECT|PPID|PS4|(?:OLD)?PWD|S?RANDOM|SECONDS"
    r"|SHELLOPTS|SHLVL"
)


def check_variables(spec: JobSpec) -> None:
    """Refuse variables that would break the launch. Raises UsageError."""
    for variables in (spec.network_env, spec.env):
        for name, value in variables.items():
            _refuse_owned(name)
            _refuse_harmful(name, value)
    for name in spec.pass_env:
        _refuse_owned(name)
        if re.fullmatch(_UNSET_FIRST, name):
            raise UsageError(
                f"{name} looks left over from another launcher and is unset on the nodes",
                hint=f"keep it with --env {name}=VALUE",
            )
        if name in spec.env or name in spec.network_env:
            raise UsageError(f"{name} is both set and passed from your shell", hint="choose one")


def _refuse_owned(name: str) -> None:
    if name == "CUDA_VISIBLE_DEVICES":
        hint = "pass --gpu-ids on this machine; on a cluster, Slurm chooses the GPUs"
    else:
        hint = "drop it; clusterrun derives it from the job"
    if re.fullmatch(_NODE_DECIDES, name):
        raise UsageError(f"{name} is set on the node", hint=hint)
    if re.fullmatch(_BASH_KEEPS, name):
        raise UsageError(f"{name} belongs to bash and cannot be set for a job")


def _refuse_harmful(name: str, value: str) -> None:
    if name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING") and value == "0":
        raise UsageError(
            f"{name}=0 turns a crash of one rank into a hang of all ranks",
            hint="drop it: by default torch ends the job",
        )
    excludes = name.endswith("_SOCKET_IFNAME") and value.startswith("^")
    if excludes and "lo" not in value[1:].split(","):
        raise UsageError(
            f"{name}={value} allows the loopback interface",
            hint=f"write ^lo,{value[1:]}",
        )
