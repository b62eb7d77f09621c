"""Prepare a node before its ranks start: report, join the other nodes, set up the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping

from clusterrun.config.choices import Device, Launcher
from clusterrun.health.facts import versions
from clusterrun.health.gpu_answer import LONG_S, GpuAnswer, device_names
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from clusterrun.launch.plan import LOOPBACK, Plan, Precision
from clusterrun.node.agent.environment import of_rank, portable, rank_environment
from clusterrun.node.agent.journal import Journal
from clusterrun.node.agent.launcher import (
    NOT_FORKED,
    AccelerateLauncher,
    DirectLauncher,
    ForgeLauncher,
    NodeLauncher,
    Start,
)
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.node.base.identity import Attempt, Identity
from clusterrun.node.base.ports import Ports, candidate_ports, free_port
from clusterrun.node.base.report import LaunchParameters, Report
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forge.launcher_variables import Variables
from clusterrun.node.forward.spool import Spool
from clusterrun.shared import shell
from clusterrun.shared.descriptors import needed_descriptors, raise_descriptor_limit
from clusterrun.shared.installed import own_version
from clusterrun.shared.wording import count, missing_text

JOIN_S, JOIN_NODE_S = 15.0, 0.03  # for nodes that are checked, and more for each node
START_MOST_S = 60.0  # the longest start that is taken into account
TORCH_ANSWER_S = 300  # a cold import from a busy shared file system
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import json, torch
print(json.dumps([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]))
"""
Capabilities = tuple[tuple[int, int], ...]


def node_report(plan: Plan, who: Identity) -> Report:
    """Return this node's report to the conductor."""
    if plan.is_smoke:  # what is wrong is reported
        return Report(node=who.node, node_rank=who.node_rank, versions={})
    is_cuda = plan.device is Device.CUDA
    is_asked = is_cuda and plan.precision is Precision.HEAD
    asked = GpuAnswer(device_names(os.environ), LONG_S)
    return Report(
        node=who.node,
        node_rank=who.node_rank,
        versions=versions(),
        capabilities=gpu_capabilities(os.environ, asked) if is_asked else (),
        problem=missing_packages(plan) or (gpu_problem(plan, os.environ, asked) if is_cuda else ""),
    )


def missing_packages(plan: Plan) -> str:
    """Return which packages for the launch this interpreter lacks; empty if none."""
    missing = [name for name in plan.strategy.packages if not own_version(name)]
    if not missing:
        return ""
    way_out = "install clusterrun[train] there, or name another interpreter with --python"
    return f"{missing_text(sys.executable, missing)}; {way_out}"


def check_descriptors(attempt: Attempt) -> None:
    """Raise the limit on open files.

    Raises NodeError if the hard limit is too low.
    """
    plan, who = attempt.plan, attempt.who
    wanted = needed_descriptors(0, plan.world_size)
    limit = raise_descriptor_limit()
    if who.is_first and limit < wanted:
        text = f"{plan.world_size} ranks need {wanted} open files in one process"
        raise NodeError(NodeExit.NODE_UNFIT, f"{who.node}: {text}; ulimit -Hn is {limit}")


def gpu_problem(plan: Plan, env: Mapping[str, str], asked: GpuAnswer) -> str:
    """Return why the node has too few GPUs for its ranks; empty if it has enough."""
    found, ranks = visible_gpus(env, asked), plan.procs_per_node
    if found is None or found >= ranks:
        return ""
    return f"only {count(found, 'GPU')} for {ranks} ranks; each rank needs one"


def visible_gpus(env: Mapping[str, str], asked: GpuAnswer) -> int | None:
    """Count the GPUs that the scheduler or the user gave this node; None if unknown."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(device_names(env))
    text = env.get("SLURM_GPUS_ON_NODE", "")
    if text.isdigit():
        return int(text)
    return None if asked.any.absent or asked.any.problem else len(asked.any.gpus)


def gpu_capabilities(env: Mapping[str, str], asked: GpuAnswer) -> Capabilities:
    """Return the compute capability of each GPU that the ranks will see; empty if unknown."""
    if visible_gpus(env, asked) == 0:
        return ()
    found = [(gpu.capability or (0, 0)) for gpu in asked.any.gpus]
    if not found or (0, 0) in found or asked.any.problem:
        return _torch_capabilities()
    return tuple((major, minor) for major, minor in found)


def _torch_capabilities() -> Capabilities:
    """Ask torch in a child process: the agent must never hold a CUDA context.

    Raises NodeError if that takes too long; the node may still be fit.
    """
    done = shell.run_once([sys.executable, "-c", _ASK_TORCH], TORCH_ANSWER_S)
    if done.rc == shell.TIMED_OUT:
        text = f"{socket.gethostname()}: importing torch took more than {TORCH_ANSWER_S} s"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)
    with contextlib.suppress(ValueError, IndexError):
        rows = json.loads(done.stdout.splitlines()[-1])
        return tuple((int(major), int(minor)) for major, minor in rows)
    return ()


def smoke_variables(plan: Plan) -> dict[str, str]:
    """Return the variables of ranks that check nodes: accelerate may not start there."""
    own = ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    sizes = {"WORLD_SIZE": plan.world_size, "LOCAL_WORLD_SIZE": plan.procs_per_node}
    return {**dict.fromkeys(own, ""), **{name: str(n) for name, n in sizes.items()}}


def attempt_ports(attempt: Attempt) -> Ports:
    """Return the ports that an attempt tries."""
    root = attempt.paths.root  # hosts may have it in different places
    job = f"{attempt.who.job_id}:{root.parent.name}/{root.name}"
    return candidate_ports(job, attempt.number, attempt.plan.port_range)


def rendezvous_port(attempt: Attempt) -> int:
    """Return a port of this node that is free now. Raises NodeError."""
    fixed = attempt.plan.main_process_port
    try:
        return free_port((fixed,) if fixed else attempt_ports(attempt).rendezvous)
    except OSError as error:
        where = f"{attempt.who.node}: port {fixed}" if fixed else attempt.who.node
        text = f"{where}: no port is free for the rendezvous: {error}"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error


def launch_arguments(attempt: Attempt, parameters: LaunchParameters) -> tuple[str, ...]:
    """Return the arguments of `accelerate launch` on this node."""
    plan, paths = attempt.plan, attempt.paths
    where = NodeLaunch(
        config_file=str(paths.accelerate),
        deepspeed_file=str(paths.deepspeed) if plan.deepspeed else "",
        machine_rank=attempt.who.node_rank,
        address=parameters.address,
        port=parameters.port,
        precision=parameters.precision,
    )
    return launch_argv(plan, where, python=sys.executable)


def host_store(attempt: Attempt, forge: Forge) -> int:
    """Have the forge host the ranks' store before they are started; return its port.

    Ranks that find no store try again half a second later.
    """
    port = rendezvous_port(attempt)
    forge.host_store((LOOPBACK, port, attempt.plan.nodes, attempt.plan.rendezvous_timeout_s))
    return port


def is_store_used(variables: Mapping[str, str]) -> bool:
    """Return whether the ranks expect that their launcher hosts the store."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


async def launch_variables(attempt: Attempt, spool: Spool, forge: Forge) -> tuple[Variables, str]:
    """Return what `accelerate launch` adds on the first node, or why that is unknown.

    It is asked before the nodes have met; `of_rank` replaces what depends on that.
    """
    precision = attempt.plan.precision
    asked = LaunchParameters(
        address=LOOPBACK,
        port=1,  # accelerate checks that nothing listens there
        interface="",
        precision=Precision.BF16.value if precision is Precision.HEAD else precision.value,
    )
    kept = ("--log_dir", str(spool.launcher_dir))
    words = (*kept, *launch_arguments(attempt, asked))
    env = rank_environment(os.environ, attempt, asked, spool.root)
    found, why = await forge.variables(env, words)
    return portable(found, env, attempt.paths.root, os.getcwd()), why


async def prepare_launch(
    attempt: Attempt, spool: Spool, forge: Forge | None, journal: Journal
) -> tuple[int, Mapping[str, str]]:
    """Return, on the first node, where the ranks meet and what accelerate gives them: variables.

    If these are known, the ranks' store is already there. Raises NodeError if no port is free.
    """
    plan, port, variables = attempt.plan, 0, dict[str, str]()
    why = "no process could be forked for that"
    if forge is not None:
        asked = asyncio.ensure_future(launch_variables(attempt, spool, forge))
        await asyncio.sleep(0)  # it asks first: the store is there sooner
        if plan.world_size > 1:
            port = host_store(attempt, forge)
        found, why = await asked
        variables = dict(found)
        if variables and is_store_used(variables) != bool(port):
            port = 0 if port else host_store(attempt, forge)
        journal.event("forge", problem=why)
    if why and plan.launcher is not Launcher.ACCELERATE:
        journal.say_not_forked(f"{NOT_FORKED.format('by accelerate launch')}: {why}")
    if not variables and plan.is_smoke:
        variables = smoke_variables(plan)
    return port or rendezvous_port(attempt), variables


def launcher_of(
    attempt: Attempt,
    parameters: LaunchParameters,
    spool: Spool,
    forge: Forge | None,
    say: Callable[[str], None],
) -> NodeLauncher:
    """Return what starts this node's ranks."""
    env = rank_environment(os.environ, attempt, parameters, spool.root)
    if not parameters.variables:
        if forge is not None:
            forge.close("accelerate launch starts the ranks")
        return AccelerateLauncher(launch_arguments(attempt, parameters), env, spool)
    spool.launcher_dir.mkdir(mode=0o700, exist_ok=True)  # for torch's error files
    start = _start(attempt, parameters, env, spool)
    if forge is None:
        return DirectLauncher(start)
    is_asked = attempt.plan.launcher is Launcher.FORGE
    return ForgeLauncher(start, forge, say if is_asked else lambda _: None)


def _start(
    attempt: Attempt, parameters: LaunchParameters, env: Mapping[str, str], spool: Spool
) -> Start:
    plan, who = attempt.plan, attempt.who
    ranks = [of_rank(attempt, parameters, env, spool, n) for n in range(plan.procs_per_node)]
    first = who.node_rank * plan.procs_per_node
    command = " ".join(plan.entry)
    is_host = who.is_first and is_store_used(parameters.variables)
    host = (parameters.address, parameters.port, plan.nodes, plan.rendezvous_timeout_s)
    return Start(
        entry=plan.entry,
        environs=[{**env, **variables} for variables in ranks],
        titles=[f"{command} [job {who.job_id} rank {first + n}]" for n in range(len(ranks))],
        first_rank=first,
        spool=spool,
        store=host if is_host else None,
    )
