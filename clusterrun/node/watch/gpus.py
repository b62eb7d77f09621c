"""Ask NVML about the attempt's GPUs while it runs, and what changed between start and failure.

One process asks (`health/gpu_load.py`). A broken driver can hang it in the kernel: it is waited for
briefly, and then left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from clusterrun.health import gpu_load, nvml
from clusterrun.health.gpus import HELD
from clusterrun.health.kernel_log import pci_address
from clusterrun.health.nvml import NvmlGpu
from clusterrun.logformat.notes import NVML, held_text, note_line
from clusterrun.shared.files import parse_object
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.typed import decoded

ANSWER_S = 3.0
IDLE_S = 2.0  # after the launch: no rank has used a GPU yet
_BLOCK_BYTES: Final = 64 << 10
_MOST: Final = 3  # GPUs that do not answer, in notes


class Asking(Enum):
    """Whether the driver can be asked."""

    OPEN = "open"
    ABSENT = "absent"  # without NVIDIA's driver, or its Python module
    ENDED = "ended"  # the process that asked has ended


class Gpus:
    """The GPUs of an attempt: those that `names` lists as CUDA_VISIBLE_DEVICES, or all.

    The first question is asked at once; `ask` and `notes` are for any thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._launched_at = names, time.time()
        self._process = subprocess.Popen(
            module_argv(sys.executable, gpu_load.__name__, *names),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._lock, self._rest, self._is_asked = threading.Lock(), b"", False
        self._first: list[NvmlGpu] | None = None
        self._answered_at = 0.0
        self.asking = Asking.OPEN
        self._write()

    @property
    def before(self) -> Mapping[str, NvmlGpu]:
        """The GPUs at the start, by PCI address; none if the driver did not answer."""
        return by_address(self._first or ())

    @property
    def pids(self) -> list[int]:
        """The process that asks, unless it has ended."""
        return [self._process.pid] if self._process.poll() is None else []

    def number(self, gpu: NvmlGpu) -> int:
        """Return the number that the ranks use for a GPU."""
        return self._names.index(gpu.name) if gpu.name in self._names else int(gpu.name)

    def ask(self, within_s: float = ANSWER_S) -> list[NvmlGpu] | None:
        """Return the state of all GPUs; None if there is no answer in time.

        A late answer is that to the next question.
        """
        with self._lock:
            if self.asking is not Asking.OPEN:
                return None
            self._write()
            line = self._line(time.monotonic() + within_s)
            found = None if line is None else self._read(line)
            if found is not None and self._first is None:
                self._first, self._answered_at = found, time.time()
            return found

    def _write(self) -> None:
        if not self._is_asked and self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
        self._is_asked = True

    def _line(self, deadline: float) -> bytes | None:
        """Read one line; None if it does not come in time, or never."""
        pipe = self._process.stdout
        while pipe and b"\n" not in self._rest:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            if not (block := os.read(pipe.fileno(), _BLOCK_BYTES)):
                self.asking = Asking.ENDED
                return None
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        self._is_asked = False
        return line

    def _read(self, line: bytes) -> list[NvmlGpu] | None:
        answer = parse_object(line) or {}
        if nvml.GPU in answer:
            gpus: list[NvmlGpu] = decoded(list[NvmlGpu], answer[nvml.GPU])
            return gpus
        self.asking = Asking.ABSENT
        return None

    def close(self) -> None:
        """End the process; one that hangs in the kernel is left alone."""
        with contextlib.suppress(OSError):
            self._process.kill()

    async def notes(self, within_s: float = ANSWER_S) -> list[str]:
        """Return a line for each change that may explain a failure."""
        now = await asyncio.to_thread(self.ask, within_s)
        if now is None:
            is_late = self.asking is Asking.OPEN
            text = f"NVIDIA's driver did not answer within {within_s:.0f} s"
            return [note_line(NVML, text)] if is_late else []
        is_early = self._answered_at - self._launched_at < IDLE_S
        found = [*self._changes(by_address(now), now), *(self._held() if is_early else [])]
        return [note_line(NVML, text) for text in found]

    def _changes(self, now: Mapping[str, NvmlGpu], gpus: Sequence[NvmlGpu]) -> Iterator[str]:
        """Describe what became worse; what was so before has not ended this attempt."""
        problems = {gpu.name: gpu.problem for gpu in gpus if gpu.problem}
        silent = [old.name for old in self.before.values() if old.name in problems][:_MOST]
        for address, old in self.before.items():
            name, new = f"GPU {self.number(old)} ({address}, {old.uuid})", now.get(address)
            if new is not None:
                yield from (f"{name}{text}" for text in worse(old, new))
            elif old.name in silent:
                yield f"{name}: {problems[old.name]}"
            elif old.name not in problems and now:
                yield f"{name} is no longer listed"

    def _held(self) -> Iterator[str]:
        """Describe GPUs whose memory others held before the ranks started."""
        for address, gpu in self.before.items():
            if gpu.used and gpu.total and gpu.used >= HELD * gpu.total:
                yield held_text(self.number(gpu), address, gpu.used >> 20, gpu.total >> 20)


def by_address(gpus: Sequence[NvmlGpu]) -> dict[str, NvmlGpu]:
    """Return the GPUs that answer by PCI address."""
    return {pci_address(gpu.address): gpu for gpu in gpus if gpu.address}


def worse(old: NvmlGpu, new: NvmlGpu) -> Iterator[str]:
    """Describe what became worse on a GPU."""
    if old.errors is not None and new.errors is not None and new.errors > old.errors:
        risen = new.errors - old.errors
        yield f": {risen} new uncorrectable ECC error{'s' if risen > 1 else ''}"
    if old.is_pending is False and new.is_pending:
        yield ": a part of its memory now waits for its replacement (reset the GPU)"
    if old.is_worn is False and new.is_worn:
        yield ": remapping a row of its memory failed (replace the GPU)"
