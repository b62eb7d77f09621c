"""Set the ranks' variables that depend on the node; `launch/environment.py` sets the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterrun.config.choices import Device
from clusterrun.launch.environment import spellings
from clusterrun.launch.plan import LOOPBACK, Precision
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import openmp_threads
from clusterrun.node.forge.ranks import python_path
from clusterrun.node.forward.spool import FLIGHT, NCCL, Spool
from clusterrun.node.link.connection import LaunchParameters
from clusterrun.shared.given import noting_changes
from clusterrun.shared.installed import installed_version
from clusterrun.shared.wording import parse_version

# They stand for what other nodes may have otherwise, or what is secret.
_RUN_DIR, _WORKDIR, _PATH, _COPY = "<run dir>", "<working directory>", "<PYTHONPATH>", "<copy of> "
_KINDS = ("", "LOCAL_", "GROUP_", "ROLE_")  # of ranks, as torchrun names them


def rank_environment(
    base: Mapping[str, str], attempt: Attempt, parameters: LaunchParameters, spool: Path
) -> dict[str, str]:
    """Return `base`, which has the plan's variables from env.sh, with this node's variables added.

    Keep what the plan or the user has set, except for the variables in `required`.
    """
    plan, who = attempt.plan, attempt.who
    run_id = f"{who.job_id}-{attempt.number}"
    suggested = {
        **_sockets(attempt, parameters),
        **_files(base, spool),
        # accelerate has no --rdzv_id; with "none" for all, two jobs could share one store.
        "PET_RDZV_ID": run_id,
    }
    # Divide the node's CPUs among its ranks, unless env.sh did; replace a login shell's value.
    names = [variable.name for variable in plan.env]
    threads = openmp_threads(names, ranks=plan.procs_per_node, nodes=len(who.nodes))
    needs_gloo = plan.strategy.is_deepspeed and plan.device is Device.CPU
    required = {
        **threads,
        "CLUSTERRUN_RUN_DIR": str(attempt.paths.root),
        "CLUSTERRUN_ATTEMPT": str(attempt.number),
        "CLUSTERRUN_JOB_ID": who.job_id,
        "CLUSTERRUN_NODE": who.node,
        "CLUSTERRUN_SPOOL": str(spool),
        "CLUSTERRUN_WORLD_SIZE": str(plan.world_size),
        "CLUSTERRUN_LOCAL_WORLD_SIZE": str(plan.procs_per_node),
        "CLUSTERRUN_WORLD_CONTRACT": "1" if plan.world_contract else "0",
        "CLUSTERRUN_TRAINER_RESUME": "1" if plan.trainer_resume else "0",
        "CLUSTERRUN_TIMEOUT_S": str(plan.timeout_s),
        "CLUSTERRUN_BACKEND": "gloo" if needs_gloo else "",
        "CLUSTERRUN_ENGINE": plan.strategy.engine,
        "CLUSTERRUN_CHECKPOINT_DIR": str(attempt.paths.checkpoints_dir),
        "PET_SIGNALS_TO_HANDLE": "SIGQUIT",  # torch's handler of SIGTERM would end the ranks
    }
    if plan.world_size == 1:  # accelerate's launcher sets nothing, and hosts no store
        required |= {
            **{f"{kind}RANK": "0" for kind in _KINDS},
            **{f"{kind}WORLD_SIZE": "1" for kind in _KINDS},
            "ROLE_NAME": "default",
            "MASTER_ADDR": parameters.address,
            "MASTER_PORT": str(parameters.port),
            **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
            "TORCHELASTIC_RUN_ID": run_id,
        }
    return noting_changes(base, {**suggested, **base, **required})  # for jobs submitted inside


def _sockets(attempt: Attempt, parameters: LaunchParameters) -> dict[str, str]:
    """Set the interface of gloo and NCCL: the planned one, else that of the agents' link."""
    planned = attempt.plan.network_interface
    if not (interface := planned or parameters.interface):
        return {}
    is_local = len(attempt.who.nodes) == 1 and parameters.address == LOOPBACK
    if is_local and not planned:
        return {"GLOO_SOCKET_IFNAME": interface}  # NCCL needs no interface within one node
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _files(base: Mapping[str, str], spool: Path) -> dict[str, str]:
    """Set where libraries write: to the spool, except for slow builds, which outlive the job."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    torch = installed_version("torch")
    libraries = f"{python}-torch{torch}-deepspeed{installed_version('deepspeed')}"
    cache = Path(base.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    names = spellings("TORCH_FR_DUMP_TEMP_FILE", parse_version(torch))  # its names in this torch
    return {
        "TRITON_CACHE_DIR": str(spool / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(spool / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(cache / "clusterrun" / "torch_extensions" / libraries),
        "NCCL_DEBUG_FILE": str(spool / f"{NCCL}.%h.%p"),
        **dict.fromkeys(names, str(spool / f"{FLIGHT}_rank_")),  # torch appends the rank
    }


def of_rank(
    attempt: Attempt,
    parameters: LaunchParameters,
    env: Mapping[str, str],
    spool: Spool,
    local_rank: int,
) -> dict[str, str]:
    """Return what `accelerate launch` would add to `env` for a rank of this node.

    `parameters` has what it adds for the first rank of node 0, whose own values are replaced here.
    """
    plan, who = attempt.plan, attempt.who
    rank = str(who.node_rank * plan.procs_per_node + local_rank)
    own = {
        "RANK": rank,
        "ROLE_RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(who.node_rank),
        "MASTER_ADDR": parameters.address,
        "MASTER_PORT": str(parameters.port),
        "TORCHELASTIC_RUN_ID": env["PET_RDZV_ID"],
        "TORCHELASTIC_ERROR_FILE": str(spool.launcher_dir / f"{local_rank}.json"),
    }
    if plan.precision is Precision.HEAD:
        own["ACCELERATE_MIXED_PRECISION"] = parameters.precision
    found = restored(parameters.variables, env, attempt.paths.root, os.getcwd())
    return {**found, **{name: value for name, value in own.items() if name in found}}


def portable(
    variables: Mapping[str, str], env: Mapping[str, str], root: Path, workdir: str
) -> dict[str, str]:
    """Put placeholders for this node's own values into variables, to send them to other nodes.

    accelerate also sets each variable of `env` in capital letters: such a copy is only marked.
    """
    sources = {name.upper(): name for name in env if name != name.upper()}
    found = {}
    for name, value in variables.items():
        if (source := sources.get(name, "")) and env[source] == value:
            found[name] = _COPY + source
            continue
        parts = value.split(":")
        own = python_path(env) if name == "PYTHONPATH" else []
        if own and parts[: len(own)] == own:
            parts[: len(own)] = [_PATH]
        parts = [_WORKDIR if part == workdir else part for part in parts]
        found[name] = ":".join(parts).replace(str(root), _RUN_DIR)
    return found


def restored(
    variables: Mapping[str, str], env: Mapping[str, str], root: Path, workdir: str
) -> dict[str, str]:
    """Replace placeholders by this node's own values; leave out copies of what it does not have."""
    found = {}
    for name, value in variables.items():
        if value.startswith(_COPY):
            if (source := value.removeprefix(_COPY)) in env:
                found[name] = env[source]
            continue
        parts = value.split(":")
        if name == "PYTHONPATH" and parts[0] == _PATH:
            parts[:1] = python_path(env)
        text = ":".join(workdir if part == _WORKDIR else part for part in parts)
        found[name] = text.replace(_RUN_DIR, str(root))
    return found
