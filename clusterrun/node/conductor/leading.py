"""The loop that talks to the agents, in a thread of the conductor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from clusterrun.launch.plan import Plan
from clusterrun.node.base.stderr import print_trouble
from clusterrun.node.base.tasks import task_error
from clusterrun.node.conductor.agents import AgentsState
from clusterrun.node.conductor.leader import Leader
from clusterrun.node.link.connection import STRANGER_BYTES, Channel
from clusterrun.node.link.head import Head
from clusterrun.rundir.paths import RunPaths

BACKLOG = 1024
FINISH_S = 5.0  # for what the agents of a step that has ended have reported
ANSWER_S = 10.0
STRANGERS = 64  # connections that have not yet proved to be agents, besides as many as nodes

Started = Callable[["Leading"], None]
_T = TypeVar("_T")


class Leading:
    """Have a leader for each attempt; `ask`, `dismiss` and `stop` are for other threads."""

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        job_id: str,
        *,
        reached: Callable[[AgentsState], None],
        tell: Callable[[str], None],
    ) -> None:
        self._about, self._reached, self._tell = (paths, plan, job_id), reached, tell
        self._most_knocking = plan.nodes + STRANGERS
        self.leader: Leader
        self._leading: asyncio.Task[None] | None = None
        self._knocking: list[asyncio.StreamWriter] = []

    @property
    def head(self) -> Head:
        """The members of the attempt."""
        return self.leader.head

    def run(self, listener: socket.socket, attempt: int, started: Started) -> None:
        """Lead the first attempt and those that follow, until `stop` is called."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._run(listener, attempt, started))

    async def _run(self, listener: socket.socket, attempt: int, started: Started) -> None:
        self._loop, self._running = asyncio.get_running_loop(), asyncio.current_task()
        self._loop.set_exception_handler(lambda _, context: self._tell(task_error(context)))
        await self.begin(attempt)
        server = await asyncio.start_server(
            self._knocked, sock=listener, limit=STRANGER_BYTES, backlog=BACKLOG
        )
        started(self)
        await server.serve_forever()

    async def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_admitted = False
        self._knocking.append(writer)
        if len(self._knocking) > self._most_knocking:  # strangers must not take all descriptors
            self._knocking.pop(0).close()
        try:
            is_admitted = await self.head.admit(Channel(reader, writer))
        finally:
            if writer in self._knocking:
                self._knocking.remove(writer)
            if not is_admitted:
                writer.close()

    def ask(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Have the loop do something; return None if that fails or takes too long."""
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(ANSWER_S)
        except Exception:  # noqa: BLE001 - the conductor decides without an answer
            print_trouble()
            asked.cancel()
            return None

    async def begin(self, attempt: int) -> bool:
        """Lead an attempt, instead of the one whose agents have gone."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.wait([self._leading])
        self._lead_on(attempt)
        return True

    def _lead_on(self, attempt: int) -> None:
        paths, plan, job_id = self._about
        self.leader = Leader(paths, plan, attempt, job_id, self._rest, self._tell)
        self._leading = asyncio.ensure_future(self._lead(self.leader))
        self._reached(AgentsState.TRAIN)

    async def _lead(self, leader: Leader) -> None:
        await leader.lead()
        if leader is self.leader:
            self._reached(AgentsState.LEFT if leader.has_lost_node else AgentsState.EXIT)

    def _rest(self, leader: Leader) -> None:
        if leader is self.leader:
            self._reached(AgentsState.REST)

    async def go_on(self, attempt: int) -> bool:
        """Have the agents that rest begin an attempt, if they all do."""
        before = self.leader
        if not before.head.is_whole:
            return False
        self._lead_on(attempt)
        before.head.send_again(attempt)
        before.released.set()
        return True

    def dismiss(self) -> None:
        """Have the agents that rest leave."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.leader.released.set)

    async def finish(self) -> None:
        """Wait for the end of an attempt whose step has ended."""
        self.leader.released.set()
        if self._leading is None:
            return
        self.head.step_ended()
        if self.head.has_members:
            await asyncio.wait([self._leading], timeout=FINISH_S)
        else:
            self._leading.cancel()

    def stop(self) -> None:
        """End the loop, which closes all connections."""
        if self._running is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._running.cancel)
