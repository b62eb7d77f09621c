"""What a node does before its ranks start: report itself, meet the others, set up the launcher."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterrun.config.spec import Device
from clusterrun.launch.accelerate_argv import launch_argv
from clusterrun.launch.plan import Plan, Precision
from clusterrun.node.agent import facts
from clusterrun.node.agent.environment import NodeFacts, rank_environment
from clusterrun.node.agent.identity import LOOPBACK, Identity
from clusterrun.node.agent.launcher import AccelerateLauncher, Launcher
from clusterrun.node.agent.ports import Ports, candidate_ports, free_port
from clusterrun.node.agent.report import Agreement, Report, precision_problem
from clusterrun.node.agent.shared_disk import SharedDisk
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.clock import Clock, Offset
from clusterrun.node.link.connection import Alone, Leader
from clusterrun.node.link.handshake import Realm
from clusterrun.node.link.head import Head
from clusterrun.node.link.member import Member
from clusterrun.node.link.questions import Answerer
from clusterrun.node.recovery.causes import NodeError, NodeExit
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.descriptors import raise_descriptor_limit
from clusterrun.shared.files import write_whole

SPARE_DESCRIPTORS = 256  # for everything else that a process opens


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an agent is to do: one node's part of one attempt of a run."""

    plan: Plan
    paths: RunPaths
    number: int
    who: Identity


def node_report(plan: Plan, who: Identity) -> Report:
    """Say what the other nodes must know of this one."""
    is_cuda = plan.device is Device.CUDA
    is_asked = is_cuda and plan.precision is Precision.HEAD
    return Report(
        node=who.node,
        node_rank=who.node_rank,
        versions=facts.versions(),
        capabilities=facts.gpu_capabilities(os.environ) if is_asked else (),
        problem=gpu_problem(plan, os.environ) if is_cuda else "",
    )


def check_descriptors(attempt: Attempt) -> None:
    """See that the head may open a connection to each node, and rank 0 one to each rank.

    Raises NodeError if not even the hard limit allows it.
    """
    plan, who = attempt.plan, attempt.who
    wanted = 2 * plan.nodes + plan.world_size + SPARE_DESCRIPTORS
    limit = raise_descriptor_limit()
    if who.is_head and limit < wanted:
        text = (
            f"{who.node}: a process may open {limit} files here (ulimit -Hn), {wanted} are needed"
        )
        raise NodeError(NodeExit.NODE_UNFIT, f"{text} for {plan.world_size} ranks")


def gpu_problem(plan: Plan, env: Mapping[str, str]) -> str:
    """Say whether the node was given fewer GPUs than it has ranks; empty where it is fit."""
    count = facts.visible_gpus(env)
    if count is None or count >= plan.procs_per_node:
        return ""
    return f"{count} GPUs were given to this node, {plan.procs_per_node} ranks need one each"


def open_link(
    attempt: Attempt,
    report: Report,
    clock: Clock,
    compared: Callable[[Offset], None],
    answerers: Mapping[str, Answerer],
    disk: SharedDisk,
) -> Leader | Member:
    """Choose this node's end of the link; raises NodeError where it is alone and unfit.

    A node whose clock differs from the head's corrects `clock` and says so to `compared`; it
    answers the head's questions by `answerers`.
    """
    who, conclusion = attempt.who, functools.partial(conclude, attempt)
    if len(who.nodes) == 1:
        if report.problem:
            raise NodeError(NodeExit.NODE_UNFIT, f"{who.node}: {report.problem}")
        return Alone(conclusion([report], LOOPBACK))
    realm = Realm.of(attempt.paths, attempt.number)
    ports = _ports(attempt).link
    timeout_s = float(attempt.plan.rendezvous_timeout_s)
    if who.is_head:
        return Head(who, realm, ports, timeout_s, conclusion, disk)
    interface_of = facts.interface_of
    return Member(who, realm, ports, timeout_s, interface_of, clock, compared, answerers, disk)


def conclude(attempt: Attempt, reports: Sequence[Report], address: str) -> Agreement:
    """Decide for all nodes what they launch with: the head's task, right before the launch."""
    precision = decided_precision(attempt.plan.precision, reports)
    problem = precision_problem(precision, reports)
    if problem and attempt.plan.precision is Precision.HEAD:
        raise NodeError(NodeExit.NODE_UNFIT, problem)
    interface = facts.interface_of(address)
    port = _rendezvous_port(attempt)
    return Agreement(address=address, port=port, interface=interface, precision=precision)


def decided_precision(planned: Precision, reports: Sequence[Report]) -> str:
    """Choose bf16 or fp16 by the head's GPUs where the plan leaves it to the head."""
    if planned is not Precision.HEAD:
        return str(planned.value)
    head = reports[0]
    if not head.capabilities:
        text = (
            f"{head.node}: the compute capability of its GPUs can't be read, which the choice of"
            " bf16 and fp16 needs; name one with --mixed-precision"
        )
        raise NodeError(NodeExit.NODE_UNFIT, text)
    return Precision.BF16.value if head.has_bf16 else Precision.FP16.value


def _job(attempt: Attempt) -> str:
    """Tell this job from all that may share its nodes: all its nodes see one run directory."""
    return f"{attempt.who.job_id}:{attempt.paths.root}"


def _ports(attempt: Attempt) -> Ports:
    return candidate_ports(_job(attempt), attempt.number, attempt.plan.port_range)


def _rendezvous_port(attempt: Attempt) -> int:
    fixed = attempt.plan.main_process_port
    try:
        return free_port((fixed,) if fixed else _ports(attempt).rendezvous)
    except OSError as error:
        where = f"{attempt.who.node}: port {fixed}" if fixed else attempt.who.node
        text = f"{where}: no port is free for the rendezvous: {error}"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error


def write_world(attempt: Attempt) -> None:
    """Write down which nodes have which ranks: the head's task, before the launch.

    The directory of checkpoints is made now, so that no node looks for it in vain and remembers.
    """
    attempt.paths.checkpoints_dir.mkdir(mode=0o700, exist_ok=True)
    world = {
        "schema": "clusterrun.world/1",
        "nodes": list(attempt.who.nodes),
        "procs_per_node": attempt.plan.procs_per_node,
    }
    write_whole(attempt.paths.world(attempt.number), json.dumps(world) + "\n")


def accelerate_launcher(attempt: Attempt, agreement: Agreement, spool: Spool) -> Launcher:
    """Set up accelerate's launcher for this node's ranks."""
    plan, paths = attempt.plan, attempt.paths
    env = rank_environment(
        os.environ,
        plan=plan,
        paths=paths,
        attempt=attempt.number,
        who=attempt.who,
        agreement=agreement,
        spool=spool.root,
        facts=_node_facts(os.environ),
    )
    arguments = launch_argv(
        plan,
        python=sys.executable,
        config_file=str(paths.accelerate),
        deepspeed_file=str(paths.deepspeed) if plan.deepspeed else "",
        machine_rank=attempt.who.node_rank,
        address=agreement.address,
        port=agreement.port,
        precision=agreement.precision,
        worker_argv=plan.entry,
    )
    return AccelerateLauncher(arguments, env, spool)


def _node_facts(env: Mapping[str, str]) -> NodeFacts:
    cache = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return NodeFacts(
        cpus=facts.allocated_cpus(env),
        torch=facts.installed_version("torch"),
        deepspeed=facts.installed_version("deepspeed"),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        cache_home=Path(cache) / "clusterrun",
        agent_pid=os.getpid(),
    )
