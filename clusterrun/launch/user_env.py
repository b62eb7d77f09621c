"""Refuse variables of the user that would break the launch."""

from __future__ import annotations

import re

from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError

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
