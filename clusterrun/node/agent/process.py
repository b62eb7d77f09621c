"""The agent as a process: signals, spool and forwarding thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from clusterrun.node.agent.agent import Agent
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.node.base.identity import Attempt, identity
from clusterrun.node.base.processes import adopt_orphans, has_children, kill_descendants
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.forge.begin import WARNINGS, take_started_forge
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.spool import create_spool
from clusterrun.node.link.member import Clock, Place
from clusterrun.node.recovery.lost import see_to_run
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.shared.control_page import ControlPage

DRAIN_S = 10.0
CANCELLING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_agent(run_dir: Path, number: int, place: Place) -> int:
    """Run attempts from `number` on, for the conductor at `place`; return the last exit status."""
    adopt_orphans()
    paths, process = RunPaths(root=run_dir), AgentProcess(place)
    code, next_attempt = 0, number
    while next_attempt:
        try:
            code, next_attempt = _run_attempt(paths, next_attempt, process)
        except NodeError as error:
            say_on_stderr(f"{socket.gethostname()}: {error.message}")
            return error.code
    return code


def _run_attempt(paths: RunPaths, number: int, process: AgentProcess) -> tuple[int, int]:
    """Run one attempt; return its exit status and the next number, 0 to exit. Raises NodeError."""
    with _required(f"cannot read {paths.plan}"):
        plan = read_plan(paths)
    who = identity(os.environ, plan.nodes)
    with _required("cannot write to the temporary directory", "; check TMPDIR and its disk space"):
        spool = create_spool(who.job_id, number, who.node_rank)
        page = ControlPage(spool.control, plan.procs_per_node)
    attempt = Attempt(plan=plan, paths=paths, number=number, who=who)
    forwarder = Forwarder(attempt, spool, process.clock)
    forwarder.start()
    agent = Agent(attempt, process.place, spool, page, forwarder, process.forge)
    agent.may_rest = process.may_rest  # until the next attempt
    try:
        return asyncio.run(process.run(agent)), agent.next_attempt
    finally:
        kill_descendants(agent.unawaited, spared=process.spared if agent.next_attempt else ())
        if not agent.next_attempt:
            process.close()
        if agent.conductor_loss is not None and not agent.was_signalled:
            see_to_run(attempt, agent.conductor_loss, forwarder.say)  # records it; may requeue
        if forwarder.finish(DRAIN_S):
            spool.remove()
        else:
            why = forwarder.problem or "too slow"
            text = f"not all logs could be written to {paths.root} ({why})"
            kept = f"the ranks' own files are kept on {who.node} in {spool.keep()}"
            say_on_stderr(f"{who.node}: {text}; {kept}")


class AgentProcess:
    """What lasts from attempt to attempt: the conductor's `place`, the clock, the forge, signals.

    Signals are also handled when no agent's loop runs: Slurm may send SIGTERM to a node that exits
    after the others.
    """

    def __init__(self, place: Place) -> None:
        self.place, started = place, take_started_forge()
        self.clock, self.forge = Clock(), Forge(started) if started else None
        self.spared = [self.forge.pid] if self.forge else []  # not killed between attempts
        # A process that a setup line has started must end with its attempt: the agent exits, too.
        self.may_rest = not has_children(self.spared)
        self._agent: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undelivered: list[Callable[[Agent], None]] = []  # Agent.end or .warn for each
        for number in CANCELLING:
            signal.signal(number, partial(self._take_signal, Agent.end))
        for number in WARNINGS:
            signal.signal(number, partial(self._take_signal, Agent.warn))

    async def run(self, agent: Agent) -> int:
        """Run an agent, and pass signals to it, including those that came before it."""
        self._agent, self._loop = agent, asyncio.get_running_loop()
        self._deliver()
        try:
            return await agent.run()
        finally:
            self._agent = self._loop = None
            if agent.next_attempt and agent.was_warned:  # while it waited for the next attempt
                self._undelivered.append(Agent.warn)

    def close(self) -> None:
        """Ignore signals from now on."""
        for number in (*CANCELLING, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)

    def _take_signal(self, act: Callable[[Agent], None], *_: object) -> None:
        self._undelivered.append(act)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._agent is not None and self._undelivered:
            self._undelivered.pop(0)(self._agent)


@contextlib.contextmanager
def _required(problem: str, hint: str = "") -> Iterator[None]:
    """Raise NodeError for an OSError or ValueError of the block: the agent can't run after it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise NodeError(NodeExit.NODE_UNFIT, f"{problem}: {error}{hint}") from error
