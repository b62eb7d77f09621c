"""The agent's end of the forge. Starting it is an agent's first act: this imports little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterrun.node.forge.packets import pair, receive, send
from clusterrun.shared.own_modules import module_argv

PRELOAD_S = 60.0  # for one module of `launch.preload`
IMPORT_S = 300.0  # torch from a busy shared file system
END_S = 6.0
_NODE_RANKS = ("CLUSTERRUN_LOCAL_NODE_RANK", "CLUSTERRUN_HOSTS_NODE_RANK", "SLURM_NODEID")
_started: list[Forge] = []


def begin(run_dir: str) -> None:
    """Start the forge of this process, if the run has one on this node."""
    rank = next((os.environ[name] for name in _NODE_RANKS if name in os.environ), "")
    with contextlib.suppress(OSError, ValueError, KeyError):  # the agent reports an unreadable plan
        plan = json.loads(Path(run_dir, "plan.json").read_text())
        is_needed = plan["launcher"] == "forge" or (plan["launcher"] == "direct" and rank == "0")
        if is_needed and not plan["is_smoke"]:
            _started.append(Forge(run_dir, is_head=rank == "0"))


def begun() -> Forge | None:
    """Return the forge that `begin` has started, once."""
    return _started.pop() if _started else None


class Forge:
    """A process that has imported what the ranks need, and forks them. It outlives attempts."""

    def __init__(self, run_dir: str, *, is_head: bool) -> None:
        self._socket, theirs = pair()
        self._output = os.memfd_create("forge")
        with theirs:
            self._process = subprocess.Popen(
                module_argv(
                    sys.executable,
                    "clusterrun.node.forge.process",
                    *(run_dir, str(os.getpid()), str(theirs.fileno()), *["head"] * is_head),
                ),
                env={**os.environ, "CLUSTERRUN_RUN_DIR": run_dir},  # for those who look in /proc
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.setblocking(False)
        self._changed_at = time.monotonic()
        self._importing = ""
        self._has_libraries = False
        self._variables: dict[str, Any] | None = None
        self._is_ended = False
        self._refusal = ""
        self.why_closed = ""
        self.problem_of_store = ""
        self.pids: list[int] = []
        self.codes: dict[int, int] = {}

    @property
    def is_importing(self) -> bool:
        """Return whether it can't follow orders yet."""
        return bool(self._importing)

    @property
    def pid(self) -> int:
        """The process that forks the ranks."""
        return self._process.pid

    async def variables(
        self, env: Mapping[str, str], arguments: Sequence[str]
    ) -> tuple[dict[str, str], str]:
        """Return what `accelerate launch` with these arguments adds to `env`, or why it can't.

        A run's arguments stay the same, so accelerate is asked once.
        """
        if not self._variables:
            self._send("variables", env=env, arguments=list(arguments))
        await self._until(lambda: self._variables is not None or not self._can_find, IMPORT_S)
        found: dict[str, Any] = self._variables or {}
        why = self.why_closed or "accelerate launch does not answer"
        return found.get("common", {}), "" if "common" in found else found.get("problem", why)

    @property
    def _can_find(self) -> bool:
        """Return whether the variables may still come: a module of the user can't prevent it."""
        return not self.is_dead and (self._has_libraries or not self.why_closed)

    def host_store(self, place: tuple[str, int, int, int]) -> None:
        """Host the store of the ranks, as torch's launcher does on the first node."""
        self._send("store", place=place)

    def launch(self, **order: Any) -> None:
        """Fork the ranks, as soon as everything is imported."""
        self.pids, self.codes, self.problem_of_store = [], {}, ""
        self._send("launch", **order)

    def look(self) -> None:
        """Take the answers that have come, and close the forge if it is dead or takes too long."""
        is_dead, is_empty = self.is_dead, False  # a fork may hold its end of the socket
        while not is_empty:
            try:
                self._take(receive(self._socket))
            except ConnectionResetError:  # it ended with orders unread; its answers follow
                is_dead = True
            except BlockingIOError:
                is_empty = True
            except (OSError, ValueError):
                is_dead = is_empty = True
        if is_dead:
            self._closed(f"it {self._how_ended()}", self._last_line())
            return
        limit_s = PRELOAD_S if self._has_libraries else IMPORT_S
        if self._importing and time.monotonic() - self._changed_at > limit_s:
            self.close(f"importing {self._importing} takes longer than {limit_s:.0f} s")

    def _take(self, answer: Mapping[str, Any]) -> None:
        event = answer["event"]
        self._changed_at = time.monotonic()
        if event == "importing":
            self._importing = answer["module"]
        elif event == "imported":
            self._has_libraries = True
        elif event in ("open", "closed"):
            self._importing, self.why_closed = "", answer.get("why", "")
        elif event == "variables":
            self._variables = dict(answer)
        elif event == "store":
            self.problem_of_store = answer.get("problem", "")
        elif event == "started":
            self.pids = answer["pids"]
        elif event == "exited":
            self.codes[answer["local_rank"]] = answer["code"]
        elif event == "ended":
            self._is_ended = True

    def _closed(self, why: str, last_line: str = "") -> None:
        at = f" while it imported {self._importing}" if self._importing else ""
        self._importing, self.why_closed = "", self.why_closed or f"{why}{at}{last_line}"

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def _how_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
            return f"exited with status {code}"
        return "closed its socket"

    def _last_line(self) -> str:
        """Return the last line of what the forge and the modules that it imported printed."""
        size = os.fstat(self._output).st_size
        lines = (
            os.pread(self._output, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
        )
        last = [line.strip() for line in lines if line.strip()][-1:]
        return f": {last[0]}" if last else ""

    def _send(self, order: str, **fields: Any) -> None:
        try:
            self._socket.setblocking(True)
            send(self._socket, {"order": order, **fields})
        except OSError as error:
            self._refusal = f"it does not take orders: {error.strerror}"
        finally:
            self._socket.setblocking(False)
        if self._refusal:
            self.look()  # it may have ended
            self._closed(self._refusal)

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + limit_s
        self.look()
        while not is_so() and not self.is_dead and (left_s := deadline - time.monotonic()) > 0:
            came = asyncio.Event()
            loop.add_reader(self._socket, came.set)
            try:
                await asyncio.wait_for(came.wait(), min(left_s, 1.0))
            except asyncio.TimeoutError:
                pass
            finally:
                loop.remove_reader(self._socket)
            self.look()
        self.look()  # it may have ended since

    async def end(self) -> None:
        """End all that it has forked; it stays ready for the next attempt."""
        self._is_ended = False
        self._send("end")
        await self._until(lambda: self._is_ended, END_S)
        if not self._is_ended:
            self.close("it did not end its ranks in time")

    def close(self, why: str) -> None:
        """End the forge, and with it the ranks that it has forked."""
        self.why_closed = self.why_closed or why
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(1.0)
