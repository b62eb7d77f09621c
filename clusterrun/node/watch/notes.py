"""Note what the node knows about a failure: its memory cgroup, its kernel and its GPUs.

A node may be shared: what the kernel reports about processes and GPUs of others is left out. One
process asks NVML about the GPUs, also while the attempt runs (`health/nvml.py`). A broken driver
can hang it in the kernel: it is waited for briefly, and then left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from clusterrun.config.choices import Device
from clusterrun.diagnosis.kinds import Note, NoteSource
from clusterrun.health import nvml
from clusterrun.health.gpus import HELD, NEEDED, device_names
from clusterrun.health.machine import own_group
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base.causes import Cause, Ending, Failure
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import descendants
from clusterrun.shared.files import parse_object
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.wording import count

ANSWER_S = 3.0
IDLE_S = 2.0  # after the launch: no rank has used a GPU yet
_BLOCK_BYTES: Final = 64 << 10
_LEAST_S: Final = 0.001  # of a wait
DEVICE: Final = Path("/dev/kmsg")
MOST_RECORDS: Final = 50_000
_RECORD_BYTES: Final = 8192  # the kernel's are shorter
INITIAL_PIDS: Final = 0xEFFFFFFC  # of /proc/self/ns/pid, unless this is a container
MOST_LINES: Final = 60
LETTERS: Final = 500  # of a line
OLD_S: Final = 7200.0  # the training went on after an older message
# Patterns, compiled after a failure alone. Linux 3-6: kernel/hung_task.c, mm/oom_kill.c,
# mm/memory-failure.c, arch/x86/mm/fault.c
_PROCESS: Final = (
    r"[Kk]ill(?:ed)? process (\d+)\b|oom_reaper: reaped process (\d+)\b"
    r"|\[(\d+)\]:? (?:segfault at|general protection|trap \w)"
    r"|task .{1,99}:(\d{1,9}) blocked for more than"
    r"|(?:Sending SIGBUS to|Killing) .{1,99}:(\d{1,9}) due to"
)
_NODE: Final = (
    r"task (?:nvidia|nv_)\S{0,99}:\d{1,9} blocked for more than"
    r"|EDAC \S+: \d+ UE |\[Hardware Error\].{0,400}(?i:uncorrect|fatal)"
    r"|\b(?:mlx[45]_\w{1,40}|hfi1|infiniband) "
    r".{0,400}(?i:health|fatal|error|timeout|assert|\bdown\b)"
    r"|\bI/O error\b|EXT4-fs error|XFS .{0,200}Corruption"
    r"|nvme\S{0,40} .{0,200}(?:timeout|resetting)|LustreError: .{0,400}evicted"
)
_RECORD: Final = r"(?P<priority>\d{1,9}),\d{1,20},(?P<us>\d{1,20}),[^;]{0,99};(?P<text>.*)"
_GPU: Final = r"NVRM: .{0,200}?\b(?P<gpu>[0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2})\b"
_GPU_PID: Final = r"\bpid='?(\d+)"
Pids = Mapping[int, int | None]  # of processes of the attempt, to ranks; None: a helper


class KernelLog:
    """The kernel's log from now on; without messages if it cannot be read."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def close(self) -> None:
        """Stop reading."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def notes(self, pids: Pids, gpus: Collection[str]) -> list[Note]:
        """Return each new message about these processes and GPUs, or about the node."""
        messages = self._messages((time.monotonic() - OLD_S) * 1e6)
        return list(islice(of_interest(messages, pids, gpus), MOST_LINES))

    def _messages(self, since_us: float) -> Iterator[str]:
        """Yield unread messages of the kernel, not of programs; `since_us` counts from the boot."""
        for _ in range(MOST_RECORDS):
            try:
                data = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # messages were overwritten
                continue
            except OSError:  # all messages are read, or the log cannot be read
                return
            if not data:
                return
            for line in data.decode(errors="replace").splitlines():
                match = re.match(_RECORD, line)
                is_of_kernel = match and int(match["priority"]) < 8  # else a program's
                if match and is_of_kernel and int(match["us"]) > since_us:
                    yield match["text"]


def of_interest(messages: Iterable[str], pids: Pids, gpus: Collection[str]) -> Iterator[Note]:
    """Choose the messages about the attempt's processes and GPUs, and about the node."""
    for text in messages:
        shown, match = text[:LETTERS], re.search(_PROCESS, text)
        # One alternative has matched: only its group has a pid.
        pid = int("".join(match.groups(default=""))) if match else 0
        if re.search(_NODE, text) or _is_of_gpu(text, pids, gpus):
            yield Note(source=NoteSource.KERNEL, text=shown)
        elif pid in pids:
            yield Note(source=NoteSource.KERNEL, text=shown, rank=pids[pid])


def _is_of_gpu(text: str, pids: Pids, gpus: Collection[str]) -> bool:
    """Return whether an Xid message is about a GPU of the attempt, and not about a foreign pid."""
    gpu, pid = re.match(_GPU, text), re.search(_GPU_PID, text)
    # In a container, `pids` is empty: any pid may be ours.
    is_foreign = bool(pid and pids and int(pid[1]) not in pids)
    return gpu is not None and not is_foreign and pci_address(gpu["gpu"]) in gpus


class Gpus:
    """The GPUs of an attempt: those that `names` lists as CUDA_VISIBLE_DEVICES, or all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._launched_at = names, time.time()
        self._own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # AGAIN: it answers each line of its input
                module_argv(sys.executable, nvml.__name__, nvml.AGAIN, *names),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lock, self._unread, self._awaits_answer = threading.Lock(), b"", False
        self.before: Mapping[str, NvmlGpu] = {}  # of the first answer, by PCI address
        self._first_answer_at = 0.0  # 0.0: none came yet
        self.is_open = True  # there may be answers
        self._send_question()

    @property
    def pids(self) -> list[int]:
        """The process that asks, unless it has ended."""
        return [self._process.pid] if self._process.poll() is None else []

    def number(self, gpu: NvmlGpu) -> int:
        """Return the number that the ranks use for a GPU."""
        return self._names.index(gpu.name) if gpu.name in self._names else int(gpu.name)

    def ask(self, within_s: float = ANSWER_S) -> list[NvmlGpu] | None:
        """Return, in any thread, the state of all GPUs; None if there is no answer in time.

        The next call returns an answer that comes late, instead of asking again.
        """
        with self._lock:
            self._send_question()
            line = self._read_answer(time.monotonic() + within_s) if self.is_open else None
            if line is None:
                return None
            answer = parse_object(line) or {}
            self.is_open = nvml.GPU in answer
            gpus = [NvmlGpu(**fields) for fields in answer.get(nvml.GPU, ())]
            if not self._first_answer_at:  # `before` and `notes` need it
                self.before, self._first_answer_at = by_address(gpus), time.time()
                self._names = self._names or [gpu.name for gpu in gpus]
            return gpus

    def _send_question(self) -> None:
        if not self._awaits_answer:
            with contextlib.suppress(OSError):
                self._own.send(b"\n")
        self._awaits_answer = True

    def _read_answer(self, deadline: float) -> bytes | None:
        """Read one line; None if it does not come in time, or never."""
        while b"\n" not in self._unread:
            self._own.settimeout(max(_LEAST_S, deadline - time.monotonic()))
            try:
                block = self._own.recv(_BLOCK_BYTES)
            except TimeoutError:
                return None
            except ConnectionError:
                block = b""
            if not block:
                self.is_open = False
                return None
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        self._awaits_answer = False
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
        is_early = self._first_answer_at - self._launched_at < IDLE_S  # before a rank used a GPU
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
        yield count(new.errors - old.errors, "new uncorrectable ECC error")
    if old.is_pending is False and new.is_pending:
        yield "a part of its memory now waits for its replacement (reset the GPU)"
    if old.is_worn is False and new.is_worn:
        yield "remapping a row of its memory failed (replace the GPU)"
    if (needed := NEEDED.get(new.recovery or 0)) and old.recovery not in NEEDED:
        yield f"the driver now asks for {needed}"


class NodeNotes:
    """What is known at the start of an attempt, to compare it with when it fails."""

    def __init__(self, attempt: Attempt) -> None:
        self._node, self._plan = attempt.who.node, attempt.plan
        self._memory = own_group()
        self._kills_before = self._memory.kills()
        self._kernel = KernelLog()
        self.gpus: Gpus | None = None

    def launching(self) -> None:
        """Ask for the state of the GPUs before ranks use them; do not wait for it."""
        if self._plan.device is Device.CUDA:
            with contextlib.suppress(OSError):
                self.gpus = Gpus(device_names(os.environ))

    def close(self) -> None:
        """Stop reading the kernel's log, and asking NVML."""
        self._kernel.close()
        if self.gpus:
            self.gpus.close()

    async def notes(self, ending: Ending, ranks: Pids) -> list[Note]:
        """Return what is known about a failed attempt; `ranks` maps pids to ranks."""
        if (failure := ending.failure) is None or not ending.cause.is_failure:
            return []
        try:
            return await self._notes_about(failure, ranks)
        except Exception as error:  # noqa: BLE001 - notes must not change how an attempt ends
            return [Note(source=NoteSource.AGENT, text=f"cannot record node evidence: {error!r}")]

    async def _notes_about(self, failure: Failure, ranks: Pids) -> list[Note]:
        """Return what the memory cgroup, the kernel and the GPUs' driver know about a failure."""
        is_container = True
        with contextlib.suppress(OSError):  # a kernel without namespaces of pids
            is_container = os.stat("/proc/self/ns/pid").st_ino != INITIAL_PIDS
        # The kernel's log has the pids of the initial namespace: a container knows others.
        pids = {} if is_container else {**dict.fromkeys(descendants()), **ranks}
        gpus: Collection[str] = self.gpus.before if self.gpus else ()
        found = [*self._of_memory(failure), *self._kernel.notes(pids, gpus)]
        if self.gpus and failure.cause is not Cause.NODE_LOST:
            found += await self.gpus.notes()
        return found

    def _of_memory(self, failure: Failure) -> list[Note]:
        """Note OOM kills, or that there was none if SIGKILL ended a rank."""
        memory = self._memory.since(self._kills_before)
        is_killed_here = failure.node == self._node and failure.signal == signal.SIGKILL
        if memory is not None and (memory.kills or is_killed_here):
            return [Note(source=NoteSource.CGROUP, text=str(memory), memory=memory)]
        return []
