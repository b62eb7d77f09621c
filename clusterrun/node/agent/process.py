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
from clusterrun.node.forge.begin import WARNINGS, begun
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
    """Run this node's agent, one attempt after the other; return the last exit status."""
    adopt_orphans()
    paths, post = RunPaths(root=run_dir), Post(place)
    code, following = 0, number
    while following:
        try:
            code, following = _run_attempt(paths, following, post)
        except NodeError as error:
            say_on_stderr(f"{socket.gethostname()}: {error.message}")
            return error.code
    return code


def _run_attempt(paths: RunPaths, number: int, post: Post) -> tuple[int, int]:
    """Run one attempt; return its exit status and the next number, 0 to exit. Raises NodeError."""
    with _needed(f"cannot read {paths.plan}"):
        plan = read_plan(paths)
    who = identity(os.environ, plan.nodes)
    with _needed("cannot write to the temporary directory", "; check TMPDIR and its disk space"):
        spool = create_spool(who.job_id, number, who.node_rank)
        page = ControlPage(spool.control, plan.procs_per_node)
    attempt = Attempt(plan=plan, paths=paths, number=number, who=who)
    forwarder = Forwarder(attempt, spool, post.clock)
    forwarder.start()
    agent = Agent(attempt, post.place, spool, page, forwarder, post.forge)
    agent.may_rest = post.may_rest
    try:
        return asyncio.run(post.run(agent)), agent.next_attempt
    finally:
        kill_descendants(agent.unawaited, spared=post.spared if agent.next_attempt else ())
        if not agent.next_attempt:
            post.close()
        if agent.lost_by is not None and not agent.was_signalled:
            see_to_run(attempt, agent.lost_by, forwarder.say)
        if forwarder.finish(DRAIN_S):
            spool.remove()
        else:
            why = forwarder.problem or "too slow"
            text = f"not all logs could be written to {paths.root} ({why})"
            kept = f"the ranks' own files are kept on {who.node} in {spool.keep()}"
            say_on_stderr(f"{who.node}: {text}; {kept}")


class Post:
    """What lasts from attempt to attempt: the conductor's `place`, the clock, the forge, signals.

    Signals are handled also after the loop of an agent: Slurm may send SIGTERM to a node that exits
    after the others.
    """

    def __init__(self, place: Place) -> None:
        self.place, started = place, begun()
        self.clock, self.forge = Clock(), Forge(started) if started else None
        self.spared = [self.forge.pid] if self.forge else []  # the processes that also last
        # A process that a setup line has left is to end with its attempt.
        self.may_rest = not has_children(self.spared)
        self._agent: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: list[Callable[[Agent], None]] = []
        for number in CANCELLING:
            signal.signal(number, partial(self._heard, Agent.end))
        for number in WARNINGS:
            signal.signal(number, partial(self._heard, Agent.warn))

    async def run(self, agent: Agent) -> int:
        """Run an agent, and pass signals to it, with those that came between two attempts."""
        self._agent, self._loop = agent, asyncio.get_running_loop()
        self._deliver()
        try:
            return await agent.run()
        finally:
            self._agent = self._loop = None
            if agent.next_attempt and agent.was_warned:  # while it rested
                self._kept.append(Agent.warn)

    def close(self) -> None:
        """Ignore signals from now on."""
        for number in (*CANCELLING, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)

    def _heard(self, act: Callable[[Agent], None], *_: object) -> None:
        self._kept.append(act)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._agent is not None and self._kept:
            self._kept.pop(0)(self._agent)


@contextlib.contextmanager
def _needed(problem: str, hint: str = "") -> Iterator[None]:
    """Raise NodeError for what an agent cannot do without."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise NodeError(NodeExit.NODE_UNFIT, f"{problem}: {error}{hint}") from error
