"""The agents of a job, as the conductor sees them: they join, train, rest or leave.

A thread of its own talks to them (`leading.py`), since the conductor may have to wait for a
scheduler or a disk. Its imports take as long as the agents' own start.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from clusterrun.errors import ClusterrunError
from clusterrun.launch.plan import LOOPBACK, Plan
from clusterrun.node.base.ports import candidate_ports, listening_socket
from clusterrun.node.base.stderr import print_trouble, say_on_stderr
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.descriptors import needed_descriptors, raise_descriptor_limit

if TYPE_CHECKING:  # imported by the thread
    from clusterrun.node.base.causes import Ending
    from clusterrun.node.conductor.leading import Leading

START_S = 60.0  # for the thread to be there


class AgentsState(Enum):
    """What the agents of an attempt do."""

    TRAIN = "train"
    REST = "rest"  # the attempt has failed, and all agents wait for the next one
    LEFT = "left"  # they exit, and their step may wait minutes for a lost node
    EXIT = "exit"  # they exit, and their step ends


class Agents:
    """The agents of a job, from attempt to attempt. `wake` wakes the conductor at a new state."""

    def __init__(self, paths: RunPaths, plan: Plan, job_id: str, wake: Callable[[], None]) -> None:
        self._paths, self._plan, self._job_id, self._wake = paths, plan, job_id, wake
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_there = threading.Event()
        self._leading: Leading | None = None
        self._first = 0
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
        return self._leading is not None and self._leading.head.is_launched

    @property
    def ending(self) -> Ending | None:
        """How the attempt ended; None before that, and if the conductor could not lead it."""
        return self._leading.leader.ending if self._leading is not None else None

    def begin(self, attempt: int) -> None:
        """Expect the agents of an attempt, once `serve` was called. Raises ClusterrunError."""
        if self._listener is None:
            self._listener = self._listen()
        if self._leading is None:
            self.state, self._first = AgentsState.TRAIN, attempt
        elif not self._leading.ask(self._leading.begin(attempt)):
            raise ClusterrunError("the thread that leads the agents does not answer")

    def _listen(self) -> socket.socket:
        limit, wanted = raise_descriptor_limit(), needed_descriptors(self._plan.nodes, 0)
        if limit < wanted:
            text = f"{self._plan.nodes} nodes need {wanted} open files in one process"
            raise ClusterrunError(f"{text}; ulimit -Hn is {limit}")
        host = LOOPBACK if self._plan.cluster.scheduler.is_this_machine else ""
        root = self._paths.root
        job = f"{self._job_id}:{root.parent.name}/{root.name}"
        ports = candidate_ports(job, 0, self._plan.port_range).link
        for port in ports:
            with contextlib.suppress(OSError):
                return listening_socket(port, host)
        text = f"no port is free for the agents ({ports[0]}, …)"
        raise ClusterrunError(text, hint="set network.port_range")

    def serve(self) -> None:
        """Start the thread, if it does not run: after the first step, which need not wait."""
        if self._thread is None:
            self._is_there.clear()
            self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        try:
            from clusterrun.node.conductor.leading import Leading

            assert self._listener is not None
            about = (self._paths, self._plan, self._job_id)
            leading = Leading(*about, reached=self._reached, tell=self.tell)
            leading.run(self._listener, self._first, self._started)
        except Exception:  # noqa: BLE001 - the next attempt gets another thread
            print_trouble()
            if self._listener is not None:
                self._listener.close()
            self._listener = self._leading = self._thread = None
            self._reached(AgentsState.LEFT)
        finally:
            self._is_there.set()

    def _started(self, leading: Leading) -> None:
        self._leading = leading
        self._is_there.set()

    def _reached(self, state: AgentsState) -> None:
        self.state = state
        self._wake()

    def go_on(self, attempt: int) -> bool:
        """Have the agents that rest begin an attempt; return False if they cannot."""
        if self._leading is None or self.state is not AgentsState.REST:
            return False
        return self._leading.ask(self._leading.go_on(attempt)) is True

    def dismiss(self) -> None:
        """Have the agents that rest leave."""
        if self._leading is not None:
            self._leading.dismiss()

    def finish(self) -> Ending | None:
        """Return how the attempt ended, once its step has ended; None if it never began."""
        if self._thread is not None and self._is_there.wait(START_S) and self._leading is not None:
            self._leading.ask(self._leading.finish())
        return self.ending

    def close(self) -> None:
        """Close all connections: agents that are left end."""
        if self._leading is not None:
            self._leading.stop()
