"""The agents of a job, as the conductor sees them: they join, train, rest or leave.

A loop in a thread of its own talks to them, since the conductor may have to wait for a scheduler
or a disk. What the thread imports takes as long as the agents' own start.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import LOOPBACK, Plan
from clusterrun.node.base.ports import candidate_ports, listening_socket
from clusterrun.node.base.stderr import print_trouble, say_on_stderr
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import needed_descriptors, raise_descriptor_limit

if TYPE_CHECKING:  # imported by the thread
    import asyncio

    from clusterrun.node.base.causes import Ending
    from clusterrun.node.conductor.leader import Leader

START_S = 60.0  # for the thread to be there
ANSWER_S = 10.0
BACKLOG = 1024
STRANGERS = 64  # connections that have not yet proved to be agents, besides as many as nodes
_T = TypeVar("_T")


class AgentsState(Enum):
    """What the agents of an attempt do."""

    TRAIN = "train"
    REST = "rest"  # the attempt has failed, and all agents wait for the next one
    LEFT = "left"  # they exit, and their step may wait minutes for a lost node
    EXIT = "exit"  # they exit, and their step ends


class Agents:
    """The agents of a job, with a leader for each attempt; each new state calls `wake`."""

    def __init__(self, paths: RunPaths, plan: Plan, job_id: str, wake: Callable[[], None]) -> None:
        self._paths, self._plan, self._job_id, self._wake = paths, plan, job_id, wake
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_ready = threading.Event()  # the thread serves, or has failed
        self._loop: asyncio.AbstractEventLoop | None = None  # the thread's
        self._serving: asyncio.Task[None] | None = None  # runs `_run`; `close` cancels it
        self._leader_class: type[Leader]  # which the thread imports
        self._leader: Leader | None = None
        self._unadmitted: list[asyncio.StreamWriter] = []  # connections, the oldest first
        self._first_attempt = 0
        self.state = AgentsState.EXIT
        self.tell: Callable[[str], None] = say_on_stderr

    @property
    def port(self) -> int:
        """The port where agents find the conductor, once an attempt has begun."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    @property
    def have_met(self) -> bool:
        """Return whether all agents of the attempt have met."""
        return self._leader is not None and self._leader.head.is_launched

    @property
    def ending(self) -> Ending | None:
        """How the attempt ended; None before that, and if the conductor could not lead it."""
        return self._leader.ending if self._leader is not None else None

    def begin(self, attempt: int) -> None:
        """Expect the agents of an attempt, as soon as a thread serves. Raises ClusterrunError."""
        if self._listener is None:
            self._listener = self._listen()
        if self._loop is None:  # no thread serves yet: `_run` leads the attempt once one does
            self.state, self._first_attempt = AgentsState.TRAIN, attempt
        elif not self._ask(self._begin(attempt)):
            raise ClusterrunError("the thread that leads the agents does not answer")

    def _listen(self) -> socket.socket:
        """Listen on the first free candidate port. Raises ClusterrunError."""
        limit, wanted = raise_descriptor_limit(), needed_descriptors(self._plan.nodes, ranks=0)
        if limit < wanted:
            text = f"{self._plan.nodes} nodes need {wanted} open files in one process"
            raise ClusterrunError(f"{text}; ulimit -Hn is {limit}")
        host = LOOPBACK if self._plan.cluster.scheduler.is_this_machine else ""
        root = self._paths.root
        job = f"{self._job_id}:{root.parent.name}/{root.name}"  # decides which ports are tried
        ports = candidate_ports(job, 0, self._plan.port_range)  # 0 stands for the agents
        for port in ports:
            with contextlib.suppress(OSError):
                return listening_socket(port, host)
        text = f"no port is free for the agents ({ports[0]}, …)"
        raise ClusterrunError(text, hint="set network.port_range")

    def serve(self) -> None:
        """Start the thread if it does not run. The step starts first: it need not wait for this."""
        if self._thread is None:
            self._is_ready.clear()
            self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
            self._thread.start()

    def go_on(self, attempt: int) -> bool:
        """Have the agents that rest begin an attempt; return False if they cannot."""
        return self.state is AgentsState.REST and self._ask(self._go_on(attempt)) is True

    def dismiss(self) -> None:
        """Have the agents that rest leave."""
        if self._leader is not None:
            self._soon(self._leader.head.release)

    def finish(self) -> Ending | None:
        """Return how the attempt ended, once its step has ended; None if it never began."""
        if self._thread is not None and self._is_ready.wait(START_S) and self._leader is not None:
            self._ask(self._leader.finish())
        return self.ending

    def close(self) -> None:
        """Close all connections: agents that are left end."""
        if self._serving is not None:
            self._soon(self._serving.cancel)

    def _ask(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Run `work` in the thread; return its result, or None if it fails or takes too long."""
        import asyncio

        if self._loop is None:
            work.close()
            return None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(ANSWER_S)
        except Exception:  # noqa: BLE001 - the conductor decides without an answer
            print_trouble()
            future.cancel()
            return None

    def _soon(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(act)

    # In the thread

    def _serve(self) -> None:
        """Run the loop; if it fails, the agents are lost, and the next attempt needs new ones."""
        try:
            import asyncio

            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._run())
        except Exception:  # noqa: BLE001 - the next attempt gets another thread
            print_trouble()
            if self._listener is not None:
                self._listener.close()
            self._listener = self._loop = self._leader = self._thread = None
            self._reached(None, AgentsState.LEFT)  # as `_leader` is None now
        finally:
            self._is_ready.set()  # after a failure, `finish` must not wait

    async def _run(self) -> None:
        """Lead the first attempt and those that follow, until `close` is called."""
        import asyncio

        from clusterrun.node.base.tasks import task_error
        from clusterrun.node.conductor.leader import Leader
        from clusterrun.node.link.connection import STRANGER_BYTES

        self._leader_class = Leader  # slow to import; once `_loop` is set, `begin` expects answers
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        self._loop.set_exception_handler(lambda _, context: self.tell(task_error(context)))
        self._lead(self._first_attempt)
        server = await asyncio.start_server(
            self._admit, sock=self._listener, limit=STRANGER_BYTES, backlog=BACKLOG
        )
        self._is_ready.set()
        await server.serve_forever()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a new connection to the attempt, or close it; close the oldest of too many."""
        is_admitted, leader = False, self._leader
        self._unadmitted.append(writer)
        if len(self._unadmitted) > self._plan.nodes + STRANGERS:  # they hold descriptors
            self._unadmitted.pop(0).close()
        try:
            is_admitted = leader is not None and await leader.head.admit(reader, writer)
        finally:
            if writer in self._unadmitted:
                self._unadmitted.remove(writer)
            if not is_admitted:
                writer.close()

    def _lead(self, attempt: int) -> None:
        about = (self._paths, self._plan, attempt, self._job_id)
        self._leader = self._leader_class(*about, self._reached, self.tell)
        self._reached(self._leader, AgentsState.TRAIN)

    def _reached(self, leader: Leader | None, state: AgentsState) -> None:
        if leader is self._leader:
            self.state = state
            self._wake()

    async def _begin(self, attempt: int) -> bool:
        """Lead an attempt instead of the last one, whose agents have gone."""
        if self._leader is not None:
            await self._leader.abandon()
        self._lead(attempt)
        return True  # `_ask` returns None if this fails

    async def _go_on(self, attempt: int) -> bool:
        """Have the agents begin an attempt; return False if not all of them rest."""
        last_leader = self._leader
        if last_leader is None or not last_leader.head.is_whole:
            return False
        self._lead(attempt)
        last_leader.head.release(attempt)
        return True
