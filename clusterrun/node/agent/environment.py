"""Set the variables of the ranks that depend on the node; `launch/nccl.py` has all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterrun.config.spec import Device
from clusterrun.launch.nccl import spellings
from clusterrun.launch.plan import Plan
from clusterrun.node.agent.identity import LOOPBACK, Identity
from clusterrun.node.agent.report import Agreement
from clusterrun.node.forward.spool import FLIGHT, NCCL
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.given import noting_changes


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the environment depends on besides plan and agreement; `cpus` are this task's."""

    cpus: int
    torch: str
    deepspeed: str
    python: str
    cache_home: Path
    agent_pid: int


def rank_environment(
    base: Mapping[str, str],
    *,
    plan: Plan,
    paths: RunPaths,
    attempt: int,
    who: Identity,
    agreement: Agreement,
    spool: Path,
    facts: NodeFacts,
) -> dict[str, str]:
    """Add to `base`, where env.sh has exported the plan's variables, what this node knows.

    What the plan or the user has set stays, except for what makes this process a rank of ours.
    """
    suggested = {
        **_sockets(plan, who, agreement),
        **_caches(spool, facts),
        **_traces(spool, facts),
        # accelerate has no --rdzv_id; with "none" for all, two jobs could meet in one store.
        "PET_RDZV_ID": f"{who.job_id}-{attempt}",
    }
    env = {
        **suggested,
        **base,
        **_threads(plan, who, facts),
        **_contract(plan, paths, attempt, who, spool, facts),
    }
    return noting_changes(base, env)


def _contract(
    plan: Plan, paths: RunPaths, attempt: int, who: Identity, spool: Path, facts: NodeFacts
) -> dict[str, str]:
    needs_gloo = plan.strategy.is_deepspeed and plan.device is Device.CPU
    return {
        "CLUSTERRUN_RUN_DIR": str(paths.root),
        "CLUSTERRUN_ATTEMPT": str(attempt),
        "CLUSTERRUN_JOB_ID": who.job_id,
        "CLUSTERRUN_NODE": who.node,
        "CLUSTERRUN_SPOOL": str(spool),
        "CLUSTERRUN_WORLD_SIZE": str(plan.world_size),
        "CLUSTERRUN_LOCAL_WORLD_SIZE": str(plan.procs_per_node),
        "CLUSTERRUN_WORLD_CONTRACT": "1" if plan.world_contract else "0",
        "CLUSTERRUN_TIMEOUT_S": str(plan.timeout_s),
        "CLUSTERRUN_BACKEND": "gloo" if needs_gloo else "",
        "CLUSTERRUN_CHECKPOINT_DIR": str(paths.checkpoints_dir),
        "CLUSTERRUN_AGENT_PID": str(facts.agent_pid),
    }


def _sockets(plan: Plan, who: Identity, agreement: Agreement) -> dict[str, str]:
    """Name the interface that carries the link; one node alone talks to itself."""
    interface = plan.network_interface or agreement.interface
    if not interface:
        return {}
    if len(who.nodes) == 1 and agreement.address == LOOPBACK and not plan.network_interface:
        return {"GLOO_SOCKET_IFNAME": interface}  # NCCL needs no interface within one node
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _caches(spool: Path, facts: NodeFacts) -> dict[str, str]:
    """Keep compilers apart: between jobs and nodes, and kept only where a build takes long."""
    libraries = f"py{facts.python}-torch{facts.torch}-deepspeed{facts.deepspeed}"
    return {
        "TRITON_CACHE_DIR": str(spool / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(spool / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(facts.cache_home / "torch_extensions" / libraries),
    }


def _traces(spool: Path, facts: NodeFacts) -> dict[str, str]:
    """Have each rank write its own on this node: the agent makes one file of them."""
    dumps = str(spool / f"{FLIGHT}_rank_")  # torch appends the rank
    names = spellings("TORCH_FR_DUMP_TEMP_FILE", _major_minor(facts.torch))
    return {"NCCL_DEBUG_FILE": str(spool / f"{NCCL}.%h.%p"), **dict.fromkeys(names, dumps)}


def _major_minor(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def _threads(plan: Plan, who: Identity, facts: NodeFacts) -> dict[str, str]:
    """Share the node's CPUs, if env.sh could not know them: as there, a shell's own 1 loses."""
    if any(variable.name == "OMP_NUM_THREADS" for variable in plan.env):
        return {}
    sharing = plan.procs_per_node * (len(who.nodes) if who.is_local else 1)
    return {"OMP_NUM_THREADS": str(max(1, facts.cpus // sharing))}
