"""The conductor's interface to where it runs, which Slurm and this machine implement, and its
signals: they come through a pipe, so that none is lost and none interrupts work.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from clusterrun.errors import ClusterrunError


class Step(Protocol):
    """The processes of one attempt, or of more if its agents rest in between."""

    def poll(self) -> int | None:
        """Return the exit status; None while it runs. Raises OSError and ClusterrunError."""

    def end(self) -> None:
        """End it with the job, first by SIGTERM; do nothing if Slurm does that."""

    def kill(self) -> None:
        """Kill all its processes."""


class Host(Protocol):
    """Where a run's attempts run; the defaults are for a host without a queue."""

    job_id: str
    records_end: bool = False  # the host, like end.json, records how the job ended
    register_after_s: float = 0.0  # that the submitter may take to record the job
    time_limit_s: float = float("inf")  # which the conductor enforces
    environ: Mapping[str, str]

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> Step:
        """Start an attempt, whose agents find the conductor at a port of this machine.

        Each node runs `bash node.sh RUN_DIR ATTEMPT HOST PORT`. Raises OSError, ClusterrunError.
        """

    def register(self) -> None:
        """Record the run's job unless it is recorded. Raises ClusterrunError and OSError."""

    def nothing_left(self) -> str:
        """Return why this job has nothing to do; empty if it has work."""
        return ""

    def refusal(self) -> str:
        """Return why the job cannot run, before its first attempt; empty if it can."""
        return ""

    def is_over(self) -> bool:
        """Return whether the scheduler's time limit ends the job now."""
        return False

    def answers(self) -> bool:
        """Return whether the scheduler answers."""
        return True

    def keep_alive(self) -> None:
        """Show readers on other machines that this process lives; called at each wait."""
        return

    def was_requeued(self) -> bool:
        """Return whether somebody, such as the script itself, has requeued this job."""
        return False

    def unreachable(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return which of these nodes can't be reached."""
        del nodes
        return ()

    def requeue(self) -> str:
        """Requeue the job; return why that fails. Raises SchedulerUnreachableError."""
        return NO_QUEUE

    def submit_successor(self, excluded: tuple[str, ...]) -> str:
        """Submit the run's next job and return its id. Raises ClusterrunError and OSError."""
        raise ClusterrunError(NO_QUEUE)

    def stay_down(self) -> None:
        """Prevent the scheduler from restarting this job after it has ended."""
        return


NO_QUEUE = "this machine has no queue"
HEARD = tuple(signal.Signals[f"SIG{n}"] for n in ("TERM", "INT", "USR1", "USR2", "CHLD", "HUP"))


class Signals:
    """The pending signals; create this first, in the main thread. Children inherit no handlers."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in HEARD:
            signal.signal(number, lambda *_: None)  # no default action; the pipe gets the number
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # unblock what a parent has blocked

    def wake(self) -> None:
        """Have `wait` return now; another thread may call this."""
        with contextlib.suppress(BlockingIOError):  # it is full: `wait` returns anyway
            os.write(self._writer, b"\0")

    def wait(self, seconds: float) -> list[int]:
        """Return the signals as soon as one arrives, or none after `seconds`."""
        readable, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return list(os.read(self._reader, 4096)) if readable else []

    def ignore(self) -> None:
        """Ignore the signals from now on: Python restores the defaults before it exits."""
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)
