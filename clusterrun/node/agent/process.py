"""The agent as a process: signals, spool, forwarding thread; what `clusterrun.node agent` runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from clusterrun.launch.plan import Plan
from clusterrun.node.agent.agent import Agent
from clusterrun.node.agent.identity import Identity, identity
from clusterrun.node.agent.preparation import Attempt
from clusterrun.node.agent.processes import adopt_orphans, kill_descendants
from clusterrun.node.agent.stderr import say_on_stderr
from clusterrun.node.forward.forward import POLL_S, Forwarder, Limits
from clusterrun.node.forward.spool import Output, Spool, create_spool
from clusterrun.node.link.clock import Clock
from clusterrun.node.recovery.causes import NodeError, NodeExit
from clusterrun.node.recovery.heir import inherit
from clusterrun.node.watch.saving import Page
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.control_page import ControlPage
from clusterrun.shared.wording import count

DRAIN_S = 10.0
NAMED_OUTPUTS = 8
CANCELLING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WARNING = (signal.SIGUSR1, signal.SIGUSR2)


def run_agent(run_dir: Path, number: int) -> int:
    """Be this node's agent for one attempt of a run; return the exit status."""
    adopt_orphans()
    paths = RunPaths(root=run_dir)
    try:
        plan = _plan(paths)
        who = identity(os.environ, plan.nodes)
        spool = _spool(who, number)
        page = _page(spool, plan.procs_per_node)
    except NodeError as error:
        say_on_stderr(f"{socket.gethostname()}: {error.message}")
        return error.code
    clock = Clock()
    forwarder = Forwarder(spool, paths, number, who.node, limits=_limits(plan), clock=clock)
    forwarder.start()
    attempt = Attempt(plan=plan, paths=paths, number=number, who=who)
    agent: Agent | None = None
    try:
        code, agent = asyncio.run(_run(attempt, spool, page, forwarder, clock))
        return code
    finally:
        kill_descendants()
        for signal_number in (*CANCELLING, *WARNING):
            signal.signal(signal_number, signal.SIG_IGN)
        if agent is not None and agent.is_orphaned:
            inherit(attempt, say=forwarder.say)
        if forwarder.finish(DRAIN_S):
            spool.remove()
        else:
            why, missing = forwarder.problem or "too slow", missing_text(forwarder.unwritten())
            text = f"{who.node}: not all logs could be written to {run_dir} ({why}){missing}"
            say_on_stderr(f"{text}; the ranks' own files are kept on {who.node} in {spool.keep()}")
        if agent is not None and agent.has_lost_node:
            _tell_batch_shell(os.environ.get("CLUSTERRUN_BATCH_PID", ""))


def _limits(plan: Plan) -> Limits:
    """Share the file system: all nodes together flush a thousand times a second at most."""
    return Limits(
        spool_bytes=plan.log_spool_bytes,
        lines_per_s=plan.log_lines_per_s,
        line_bytes=plan.log_line_bytes,
        poll_s=max(POLL_S, plan.nodes / 1000),
    )


def _tell_batch_shell(pid: str) -> None:
    """Say that all agents that can have left: srun may wait for a lost node for minutes."""
    if pid.isdigit():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGURG)


def missing_text(sizes: Mapping[Output, int]) -> str:
    """Say how much of which outputs is not in the log; what waited to be written may be in it."""
    if not sizes:
        return ""
    text = f": up to {sum(sizes.values()):,} bytes of {count(len(sizes), 'output')} are missing"
    if len(sizes) > NAMED_OUTPUTS:
        return text
    return f"{text}: {', '.join(f'{output.name} {size:,}' for output, size in sizes.items())}"


def _plan(paths: RunPaths) -> Plan:
    try:
        return Plan.from_json(paths.plan.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise NodeError(NodeExit.NODE_UNFIT, f"cannot read {paths.plan}: {error}") from error


def _spool(who: Identity, number: int) -> Spool:
    try:
        return create_spool(who.job_id, number, who.node_rank)
    except OSError as error:
        text = f"no directory for temporary files can be made: {error}; see TMPDIR"
        raise NodeError(NodeExit.NODE_UNFIT, text) from error


def _page(spool: Spool, ranks: int) -> Page:
    try:
        return Page(ControlPage(spool.control, ranks), ranks)
    except OSError as error:
        spool.remove()
        text = f"no page can be shared with the ranks: {error}; is the disk of TMPDIR full?"
        raise NodeError(NodeExit.NODE_UNFIT, text) from error


async def _run(
    attempt: Attempt, spool: Spool, page: Page, forwarder: Forwarder, clock: Clock
) -> tuple[int, Agent]:
    """Run the agent; return the exit status."""
    loop = asyncio.get_running_loop()
    agent = Agent(attempt, spool, page, forwarder, clock)

    def soon(act: Callable[[], None]) -> Callable[..., None]:
        def handler(*_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(act)

        return handler

    # Not the loop's own handlers: they go with it, and Slurm may still send SIGTERM to a node
    # that leaves a moment after the others. Launcher and ranks ignore what warns us.
    for number in CANCELLING:
        signal.signal(number, soon(agent.end))
    for number in WARNING:
        signal.signal(number, soon(agent.warn))
    return await agent.run(), agent
