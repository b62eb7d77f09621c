"""The identity of an agent: its job, its node and its attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.hostlist import parse_hostlist


class Identity(NamedTuple):
    """One node of one job; `nodes` is in rank order. The conductor runs on `conductor`."""

    job_id: str
    node: str
    node_rank: int
    nodes: tuple[str, ...]
    conductor: str

    @property
    def is_first(self) -> bool:
        """Return whether rank 0 is on this node."""
        return self.node_rank == 0


class Attempt(NamedTuple):
    """One node's part of one attempt of a run."""

    plan: Plan
    paths: RunPaths
    number: int
    who: Identity


def identity(env: Mapping[str, str], nodes: int) -> Identity:
    """Return this agent's identity; `nodes` is the plan's number of nodes.

    Raises NodeError if the environment names no node, or another number of nodes. There is no
    fallback to this host: every node would train alone.
    """
    if "CLUSTERRUN_LOCAL_NODE_RANK" in env:  # nodes are simulated on one machine
        rank = _number(env, "CLUSTERRUN_LOCAL_NODE_RANK")
        names = tuple(map(local_node, range(nodes)))
        job_id = env.get("CLUSTERRUN_LOCAL_JOB_ID", "L0")
    elif "CLUSTERRUN_HOSTS_NODE_RANK" in env:  # hosts over ssh or in an allocation
        rank = _number(env, "CLUSTERRUN_HOSTS_NODE_RANK")
        names = tuple(env["CLUSTERRUN_HOSTS_NODES"].split(","))
        job_id = env["CLUSTERRUN_HOSTS_JOB_ID"]
    elif "SLURM_JOB_ID" in env:
        return _slurm_identity(env, nodes)
    else:
        why = "neither SLURM_JOB_ID nor CLUSTERRUN_LOCAL_NODE_RANK is set"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, f"this is not a task of a job: {why}")
    return Identity(
        job_id=job_id, node=names[rank], node_rank=rank, nodes=names, conductor=names[0]
    )


def local_node(rank: int) -> str:
    """Return the name of a simulated node."""
    return f"local{rank}"


def _slurm_identity(env: Mapping[str, str], nodes: int) -> Identity:
    """Return the identity of a Slurm task, whose step may run on fewer nodes than the job."""
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    hosts = _nodes(nodelist)
    if len(hosts) != nodes:
        message = f"Slurm gave {len(hosts)} nodes ({nodelist}), but the job was planned for {nodes}"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, message)
    rank = _number(env, "SLURM_NODEID")
    return Identity(
        job_id=env["SLURM_JOB_ID"],
        node=env.get("SLURMD_NODENAME") or hosts[rank],
        node_rank=rank,
        nodes=hosts,
        conductor=(_nodes(env.get("SLURM_JOB_NODELIST", "")) or hosts)[0],  # the batch host
    )


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return tuple(parse_hostlist(text))
    except ClusterrunError as error:
        message = f"cannot read the node list {text!r}: {error.message}"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, message) from error


def _number(env: Mapping[str, str], name: str) -> int:
    if not (text := env.get(name, "")).isdigit():
        shown = repr(text) if text else "not set"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, f"{name} must be a number, but is {shown}")
    return int(text)
