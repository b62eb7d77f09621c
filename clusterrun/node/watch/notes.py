"""Note what the node knows about a failure: its memory cgroup, its kernel and its GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from itertools import chain

from clusterrun.config.choices import Device
from clusterrun.health.cgroup import own_group
from clusterrun.health.gpu_answer import device_names
from clusterrun.logformat.notes import Note, NoteSource
from clusterrun.node.base.causes import Cause, Ending
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import descendants
from clusterrun.node.watch.gpus import Gpus
from clusterrun.node.watch.kernel import KernelLog, Own, is_container, is_node_ours
from clusterrun.node.watch.preflight import NodeChecks


class NodeNotes:
    """What is known at the start of an attempt, to compare it with when it fails."""

    def __init__(self, attempt: Attempt, checks: NodeChecks) -> None:
        self._node, self._plan = attempt.who.node, attempt.plan
        self._checks = checks
        self._memory = own_group()
        self._kills_before = self._memory.kills()
        self._kernel = KernelLog()
        self.gpus: Gpus | None = None

    def launching(self) -> None:
        """Ask for the state of the GPUs before ranks use them; do not wait for it."""
        if self._plan.device is Device.CUDA:
            with contextlib.suppress(OSError):
                self.gpus = Gpus(device_names(os.environ))

    @property
    def pids(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return [*(self.gpus.pids if self.gpus else []), *self._checks.pids]

    def missing(self) -> dict[str, str]:
        """Return what cannot be read on this node, and why."""
        return {"kernel_log": self._kernel.problem} if self._kernel.problem else {}

    def close(self) -> None:
        """Stop reading the kernel's log, and asking NVML."""
        self._kernel.close()
        if self.gpus:
            self.gpus.close()

    async def notes(self, ending: Ending, ranks: Mapping[int, int | None]) -> list[Note]:
        """Return what is known about a failed attempt; `ranks` maps pids to ranks."""
        if ending.failure is None or not ending.cause.is_failure:
            return []
        try:
            return await self._found(ending, ranks)
        except Exception as error:  # noqa: BLE001 - notes must not change how an attempt ends
            return [
                Note(source=NoteSource.AGENT, text=f"cannot note what the node knows: {error!r}")
            ]

    async def _found(self, ending: Ending, ranks: Mapping[int, int | None]) -> list[Note]:
        pids = {} if is_container() else {**dict.fromkeys(descendants()), **ranks}
        is_all = self.gpus is not None and is_node_ours(self._plan.procs_per_node)
        before = self.gpus.before if self.gpus else ()
        own = Own(pids=pids, job=self._memory.job, gpus=None if is_all else frozenset(before))
        found = [*self._of_memory(ending), *self._kernel.notes(own)]
        is_here = ending.failure is not None and ending.failure.node == self._node
        slow = []
        if self.gpus and ending.cause is not Cause.NODE_LOST:
            slow.append(self.gpus.notes())
        if slow or is_here:  # with GPUs on all nodes, as another may notice a fault first
            slow.append(self._checks.changes())
        return [*found, *chain(*await asyncio.gather(*slow))]

    def _of_memory(self, ending: Ending) -> list[Note]:
        """Note OOM kills, or that there was none if SIGKILL ended a rank."""
        failure, found = ending.failure, self._memory.since(self._kills_before)
        if failure is None or found is None:
            return []
        is_killed_here = failure.node == self._node and failure.signal == signal.SIGKILL
        if not (found.kills or is_killed_here):
            return []
        return [Note(source=NoteSource.CGROUP, text=str(found), memory=found)]
