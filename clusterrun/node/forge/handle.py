"""The agent's end of the forge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from clusterrun.errors import shortened
from clusterrun.node.base.processes import how_ended
from clusterrun.node.forge.begin import INSTEAD, Started, receive, send

IMPORT_S = 300.0  # torch from a busy shared file system
END_S = 6.0
OUTPUT_BYTES = 1 << 20


class Forge:
    """A process that imports what the ranks need, and forks them in each attempt of the job."""

    def __init__(self, started: Started) -> None:
        self.pid, self._process = started.pid, psutil.Process(started.pid)
        self._socket, self._output = started.link, started.output
        self._answered_at = time.monotonic()
        self.importing = ""  # a module, during whose import it follows no orders
        self.why_closed = self.problem_of_store = ""
        self._has_libraries = self._have_forks_ended = False  # libraries: torch, accelerate
        self._variables: dict[str, Any] | None = None
        self._shown = 0  # bytes of its output that have been taken
        self.pids: list[int] = []

    async def variables(
        self, env: Mapping[str, str], arguments: Sequence[str]
    ) -> tuple[dict[str, str], str]:
        """Return what `accelerate launch` adds to `env`, or why it can't; a run asks once."""
        if not self._variables:
            self._send("variables", env=env, arguments=list(arguments))

        def is_known() -> bool:
            # Once the forge has torch and accelerate, it answers even if a later import closes it.
            will_not_come = bool(self.why_closed) and not self._has_libraries
            return self._variables is not None or will_not_come

        await self._take_until(is_known, IMPORT_S)
        why = self.why_closed or "accelerate launch does not answer"
        found: dict[str, Any] = self._variables or {"problem": why}
        return found.get("common", {}), found.get("problem", "")

    def host_store(self, place: tuple[str, int, int, int]) -> None:
        """Host the store of the ranks, as torch's launcher does on the first node."""
        self.problem_of_store = ""
        self._send("store", place=place)

    def launch(self, **order: Any) -> None:
        """Fork the ranks, as soon as everything is imported."""
        self.pids = []
        self._send("launch", **order)

    def take_answers(self) -> None:
        """Take the answers that have come, and close the forge if it is dead or takes too long."""
        is_dead, has_more = self.is_dead, True  # if it is dead, a fork may keep its socket open
        while has_more:
            try:
                self._take(receive(self._socket, socket.MSG_DONTWAIT))
            except ConnectionResetError:  # it ended with orders unread; its answers follow
                is_dead = True
            except BlockingIOError:  # no answer is left
                has_more = False
            except (OSError, ValueError):  # the other end is closed
                is_dead, has_more = True, False
        if is_dead:
            self._note_closed(f"the forge {self.how_ended()}")
            return
        if self.importing and time.monotonic() - self._answered_at > IMPORT_S:
            text = f"importing {self.importing} takes longer than {IMPORT_S:.0f} s"
            self.close(f"{text}; hint: {INSTEAD}")

    def _take(self, answer: dict[str, Any]) -> None:
        """Note an event of the forge: "open" when it can fork ranks, "closed" if it cannot."""
        self._answered_at = time.monotonic()
        match answer.pop("event"):
            case "importing":
                self.importing = answer["module"]
            case "imported":
                self._has_libraries, self.importing = True, ""
            case "open":
                self.importing = ""
            case "closed":
                self.importing = ""
                self._note_closed(answer["why"])
            case "variables":
                self._variables = answer
            case "store":
                self.problem_of_store = answer.get("problem", "")
            case "started":
                self.pids = answer["pids"]
            case "ended":
                self._have_forks_ended = True

    def _note_closed(self, why: str) -> None:
        if self.importing:
            why = f"{why} while it imported {self.importing}; hint: {INSTEAD}"
        self.importing = ""
        self.why_closed = self.why_closed or shortened(why)

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        with contextlib.suppress(ChildProcessError):  # `how_ended` has reaped it
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def how_ended(self) -> str:
        """Return how the process ended, as in `was killed by SIGKILL`."""
        with contextlib.suppress(psutil.TimeoutExpired):
            return how_ended(self._process.wait(1.0) or 0)
        return "closed its socket"

    def new_output(self) -> bytes:
        """Return what the forge, and modules that it imported, have printed since the last call."""
        text = os.pread(self._output, OUTPUT_BYTES, self._shown)
        self._shown += len(text)
        return text

    def _send(self, order: str, **fields: Any) -> None:
        """Send an order; if that fails, the forge counts as closed."""
        try:
            send(self._socket, {"order": order, **fields})
        except OSError as error:
            self.take_answers()  # it may have ended
            self._note_closed(f"the forge does not accept orders: {error.strerror}")

    async def _take_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Take answers until `is_done()`, the forge is dead or the time is up."""
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + limit_s
        self.take_answers()
        while not is_done() and not self.is_dead and (left_s := deadline - time.monotonic()) > 0:
            has_answer = asyncio.Event()
            loop.add_reader(self._socket, has_answer.set)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(has_answer.wait(), min(left_s, 1.0))
            loop.remove_reader(self._socket)
            self.take_answers()
        self.take_answers()  # it may have ended since

    async def end(self) -> None:
        """End all that it has forked; it stays ready for the next attempt."""
        self._have_forks_ended = False
        self._send("end")
        await self._take_until(lambda: self._have_forks_ended, END_S)
        if not self._have_forks_ended:
            self.close("the forge did not end its ranks in time")

    def close(self, why: str) -> None:
        """End the forge, and with it the ranks that it has forked."""
        self.why_closed = self.why_closed or shortened(why)
        with contextlib.suppress(psutil.Error):  # it has ended, or is stuck in the kernel
            self._process.kill()
            self._process.wait(1.0)
