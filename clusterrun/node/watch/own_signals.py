"""The warnings that a script handles itself: which ranks of this node catch which signals.

Scripts save in their own handlers, as by hand. Slurm may have signalled the ranks already: that
depends on its process tracking. A process of the step that does nothing else shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from clusterrun.shared.control_page import ControlPage

# A script that catches several gets the first one.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOOK_S = 1.0
DELIVERY_S = 0.5  # for Slurm to signal all processes of a node
RECENT_S = 10.0  # earlier signals were a person's
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


def caught(pid: int) -> frozenset[int]:
    """Return which warnings a process has handlers for (proc(5)); none if it is gone."""
    with contextlib.suppress(OSError):
        if found := _CAUGHT.search(Path(f"/proc/{pid}/status").read_text(errors="replace")):
            return frozenset(n for n in WARNINGS if int(found[1], 16) >> n - 1 & 1)
    return frozenset()


def choose(handled: Collection[int], first: Collection[int]) -> int:
    """Return the signal that warns a process, 0 for none; those in `first` are preferred."""
    return next((n for n in (*first, *WARNINGS) if n in handled), 0)


def named_signals(request: str) -> tuple[int, ...]:
    """Return SIGUSR1 if slurm.signal names it; SIGUSR2 is also what clusterrun names."""
    name = request.rpartition(":")[2].partition("@")[0].upper()
    return (int(signal.SIGUSR1),) if name.removeprefix("SIG") in ("USR1", "10") else ()


@dataclass(kw_only=True)
class OwnSignals:
    """The ranks of this node that catch warnings, and those that were warned.

    `pids` returns the running ranks by local rank. With `is_in_step`, Slurm may signal them itself.
    """

    page: ControlPage
    pids: Callable[[], Mapping[int, int]]
    is_in_step: bool = False
    warned: set[int] = field(default_factory=set)
    _handled: dict[int, set[int]] = field(default_factory=dict)
    _delivered: dict[int, float] = field(default_factory=dict)
    _witness: Popen[bytes] | None = None
    _looked_at: float = 0.0

    @property
    def witnesses(self) -> list[int]:
        """The pid of the process that gets the same signals from Slurm as a rank."""
        return [self._witness.pid] if self._witness else []

    @property
    def are_caught(self) -> bool:
        """Return whether a rank of this node handles a warning itself."""
        self.look(after_s=0.0)
        return any(self._handled.values())

    def look(self, after_s: float = LOOK_S) -> None:
        """Note now and then what the ranks catch: some end as soon as they are signalled."""
        self._watch_slurm()
        if time.monotonic() - self._looked_at < after_s:
            return
        self._looked_at = time.monotonic()
        for rank, pid in self.pids().items():
            self._handled[pid] = {n for n in caught(pid) if not self.page.is_shielded(rank, n)}

    def _watch_slurm(self) -> None:
        if self._witness is not None and (code := self._witness.poll()) is not None:
            self._delivered[-code] = time.monotonic()
            if -code == signal.SIGTERM:  # ranks may restore the default once they have handled it
                self.warned |= {pid for pid, handled in self._handled.items() if -code in handled}
            self._witness = None
        if self.is_in_step and self._witness is None:
            with contextlib.suppress(OSError):  # it ends with this process, at the end of its input
                self._witness = Popen(
                    ["cat"], 0, None, PIPE, DEVNULL, DEVNULL, start_new_session=True
                )

    async def warn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Warn the ranks that handle a warning and were not warned; count these, and who is left.

        `first` is preferred to SIGTERM, `only` is what may be sent; Slurm's own signals count.
        """
        if self.is_in_step and self.are_caught and not self.warned:
            await asyncio.sleep(DELIVERY_S)
        self.look(after_s=0.0)
        running, only, now = {*self.pids().values()}, {*message["only"]}, time.monotonic()
        delivered = [n for n, at in self._delivered.items() if now - at < RECENT_S]
        for pid, handled in self._handled.items():
            number = choose(handled & only, (*delivered, *message["first"]))
            if pid in self.warned or not number:
                continue
            if number in delivered:
                self.warned.add(pid)
            elif pid in running:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                    self.warned.add(pid)
        return {"warned": len(self.warned), "left": len(self.warned & running)}
