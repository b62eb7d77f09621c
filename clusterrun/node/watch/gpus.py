"""Ask NVML about the attempt's GPUs while it runs, and what changed between start and failure.

One process asks (`health/nvml.py`). A broken driver can hang it in the kernel: it is waited for
briefly, and then left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clusterrun.diagnosis.kinds import Note, NoteSource
from clusterrun.health import nvml
from clusterrun.health.gpus import HELD
from clusterrun.health.nvml import NvmlGpu
from clusterrun.shared.files import parse_object
from clusterrun.shared.own_modules import module_argv

ANSWER_S = 3.0
IDLE_S = 2.0  # after the launch: no rank has used a GPU yet
_BLOCK_BYTES: Final = 64 << 10
_LEAST_S: Final = 0.001  # of a wait


class Gpus:
    """The GPUs of an attempt: those that `names` lists as CUDA_VISIBLE_DEVICES, or all.

    The first question is asked at once; `ask` and `notes` are for any thread. `before` are the GPUs
    of the first answer, by PCI address. `is_open`: there may be answers; `has_ended`: the process
    that asks has ended.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._launched_at = names, time.time()
        self._own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_argv(sys.executable, nvml.__name__, nvml.AGAIN, *names),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lock, self._rest, self._is_asked = threading.Lock(), b"", False
        self.before: Mapping[str, NvmlGpu] = {}
        self._answered_at = 0.0
        self.is_open, self.has_ended = True, False
        self._write()

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
            self._write()
            line = self._line(time.monotonic() + within_s) if self.is_open else None
            if line is None:
                return None
            answer = parse_object(line) or {}
            self.is_open = nvml.GPU in answer
            found = [NvmlGpu(**each) for each in answer.get(nvml.GPU, ())]
            if not self._answered_at:
                self.before, self._answered_at = by_address(found), time.time()
                self._names = self._names or [gpu.name for gpu in found]
            return found

    def _write(self) -> None:
        if not self._is_asked:
            with contextlib.suppress(OSError):
                self._own.send(b"\n")
        self._is_asked = True

    def _line(self, deadline: float) -> bytes | None:
        """Read one line; None if it does not come in time, or never."""
        while b"\n" not in self._rest:
            self._own.settimeout(max(_LEAST_S, deadline - time.monotonic()))
            try:
                block = self._own.recv(_BLOCK_BYTES)
            except TimeoutError:
                return None
            except ConnectionError:
                block = b""
            if not block:
                self.is_open, self.has_ended = False, True
                return None
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        self._is_asked = False
        return line

    def close(self) -> None:
        """End the process; one that hangs in the kernel is left alone."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._own.close()

    async def notes(self, within_s: float = ANSWER_S) -> list[Note]:
        """Return each change that may explain a failure."""
        now = await asyncio.to_thread(self.ask, within_s)
        if now is None:
            text = f"NVIDIA's driver did not answer within {within_s:.0f} s"
            return [Note(source=NoteSource.NVML, text=text)] if self.is_open else []
        is_early = self._answered_at - self._launched_at < IDLE_S
        found = [Note(source=NoteSource.NVML, text=text) for text in self._changes(now)]
        return [*found, *(self._held() if is_early else [])]

    def _changes(self, gpus: Sequence[NvmlGpu]) -> Iterator[str]:
        """Describe what became worse; what was so before has not ended this attempt."""
        now, problems = by_address(gpus), {gpu.name: gpu.problem for gpu in gpus}
        for address, old in self.before.items():
            name, new = f"GPU {self.number(old)} ({address}, {old.uuid})", now.get(address)
            if new is not None:
                yield from (f"{name}: {text}" for text in worse(old, new))
            elif problem := problems.get(old.name):
                yield f"{name}: {problem}"
            elif now:
                yield f"{name} is no longer listed"

    def _held(self) -> Iterator[Note]:
        """Describe GPUs whose memory others held before the ranks started."""
        for address, gpu in self.before.items():
            if gpu.used and gpu.total and gpu.used >= HELD * gpu.total:
                number, memory = self.number(gpu), f"{gpu.used >> 20} of {gpu.total >> 20} MiB"
                text = f"GPU {number} ({address}): {memory} were in use before the ranks started"
                yield Note(source=NoteSource.NVML, text=text, held_gpu=number)


def pci_address(text: str) -> str:
    """Return an address as Xid messages have it.

    >>> pci_address("00000000:3B:00.0")
    '0000:3b:00'
    """
    domain, bus, device = text.lower().split(":")[:3]
    return f"{domain[-4:]}:{bus}:{device.partition('.')[0]}"


def by_address(gpus: Sequence[NvmlGpu]) -> dict[str, NvmlGpu]:
    """Return the GPUs that answer by PCI address."""
    return {pci_address(gpu.address): gpu for gpu in gpus if gpu.address}


def worse(old: NvmlGpu, new: NvmlGpu) -> Iterator[str]:
    """Describe what became worse on a GPU."""
    if old.errors is not None and new.errors is not None and new.errors > old.errors:
        risen = new.errors - old.errors
        yield f"{risen} new uncorrectable ECC error{'s' if risen > 1 else ''}"
    if old.is_pending is False and new.is_pending:
        yield "a part of its memory now waits for its replacement (reset the GPU)"
    if old.is_worn is False and new.is_worn:
        yield "remapping a row of its memory failed (replace the GPU)"
