"""Ask nvidia-smi what changed on the attempt's GPUs between its start and its failure.

A broken driver can hang nvidia-smi in the kernel: it is waited for briefly, and then left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from clusterrun.health.gpus import HELD
from clusterrun.health.kernel_log import pci_address
from clusterrun.logformat.notes import NVIDIA_SMI, held_text, note_line

ANSWER_S = 3.0
IDLE_S = 2.0  # after the launch: no rank has used a GPU yet
_LOOK_S: Final = 0.02
_MOST_BYTES: Final = 64 << 10
_COUNTS: Final = "memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
# Fields that drivers know since version 319; remapped rows came with 450, as a query of their own.
_QUERIES: Final = (
    f"--query-gpu=pci.bus_id,index,uuid,{_COUNTS},retired_pages.pending",
    "--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure",
)
_PROBLEM: Final = re.compile(
    r"Unable to determine the device handle|GPU is lost|NVIDIA-SMI has failed"
    r"|Failed to initialize NVML: Unknown Error"
)
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}")
_ANSWERS: Final = {"Yes": True, "No": False}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU as nvidia-smi shows it, with the number that the ranks use; None: it did not say.

    `is_pending`: a page or a row of its memory is to be replaced. `is_worn`: no row is left.
    """

    index: int
    uuid: str
    used: int | None = None
    total: int | None = None
    errors: int | None = None
    is_pending: bool | None = None
    is_worn: bool | None = None


class SmiQuery:
    """A running nvidia-smi for each of the queries; `pids` are theirs."""

    def __init__(self, program: str) -> None:
        self._outputs = [tempfile.TemporaryFile() for _ in _QUERIES]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [program, query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for query, output in zip(_QUERIES, self._outputs, strict=True)
        ]
        self.pids = [process.pid for process in self._processes]

    @property
    def is_running(self) -> bool:
        """Return whether it has not answered."""
        return any(process.poll() is None for process in self._processes)

    def read(self) -> tuple[list[str], float]:
        """Return the answers, and when the one about memory was complete."""
        texts, answered_at = [], os.fstat(self._outputs[0].fileno()).st_mtime
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read(_MOST_BYTES).decode(errors="replace"))
            output.close()
        return texts, answered_at


class Gpus:
    """The GPUs of an attempt: those that `names` lists as CUDA_VISIBLE_DEVICES, or all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._program = shutil.which(NVIDIA_SMI)
        self._launched_at = time.time()
        self._first = self._query()
        self._last: SmiQuery | None = None
        self._before: dict[str, GpuState] | None = None
        self._answered_at = 0.0

    def _query(self) -> SmiQuery | None:
        with contextlib.suppress(OSError):
            return SmiQuery(self._program) if self._program else None
        return None

    @property
    def before(self) -> Mapping[str, GpuState]:
        """The GPUs at the start, by PCI address; none if nvidia-smi did not answer."""
        if self._before is None and self._first is not None and not self._first.is_running:
            texts, self._answered_at = self._first.read()
            self._before = parsed(texts, self._names)
        return self._before or {}

    @property
    def pids(self) -> list[int]:
        """The processes of nvidia-smi that have not ended."""
        queries = {query for query in (self._first, self._last) if query and query.is_running}
        return [pid for query in queries for pid in query.pids]

    async def notes(self, within_s: float = ANSWER_S) -> list[str]:
        """Return a line for each change that may explain a failure."""
        before = self.before
        self._last = query = self._first if self._before is None else self._query()
        if query is None:
            return []
        deadline = time.monotonic() + within_s
        while query.is_running and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        if query.is_running:
            return [note_line(NVIDIA_SMI, f"nvidia-smi did not answer within {within_s:.0f} s")]
        texts, _ = query.read()
        is_early = self._answered_at - self._launched_at < IDLE_S
        found = [*problems(texts[0], before), *changes(before, parsed(texts, self._names))]
        found += held(before) if is_early else []
        return [note_line(NVIDIA_SMI, text) for text in found]


def parsed(texts: Sequence[str], names: Sequence[str]) -> dict[str, GpuState]:
    """Read nvidia-smi's answers, by PCI address; leave out the GPUs of other jobs."""
    remapped = {pci_address(row[0]): row for row in _rows(texts[1], 3) if ":" in row[0]}
    found = {}
    for address, index, uuid, used, total, errors, retired in _rows(texts[0], 7):
        ours = [n for n, name in enumerate(names) if index == name or uuid.startswith(name)]
        if not index.isdigit() or (names and not ours):
            continue
        key = pci_address(address)
        _, pending, failure = remapped.get(key, ("", "", ""))
        waiting = [_ANSWERS[text] for text in (retired, pending) if text in _ANSWERS]
        found[key] = GpuState(
            index=ours[0] if ours else int(index),
            uuid=uuid,
            used=_number(used),
            total=_number(total),
            errors=_number(errors),
            is_pending=any(waiting) if waiting else None,
            is_worn=_ANSWERS.get(failure),
        )
    return found


def _rows(text: str, cells: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == cells]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def problems(text: str, before: Mapping[str, GpuState]) -> Iterator[str]:
    """Yield what nvidia-smi reports instead of GPUs that it listed before."""
    for line in islice((line for line in text.splitlines() if before and _PROBLEM.search(line)), 3):
        address = _ADDRESS.search(line)
        if address is None or pci_address(address[0]) in before:
            yield line


def changes(before: Mapping[str, GpuState], now: Mapping[str, GpuState]) -> Iterator[str]:
    """Describe what became worse; what was so before has not ended this attempt."""
    for address, old in before.items():
        name, new = f"GPU {old.index} ({address}, {old.uuid})", now.get(address)
        if new is None:
            if now:
                yield f"{name} is no longer listed"
            continue
        if old.errors is not None and new.errors is not None and new.errors > old.errors:
            risen = new.errors - old.errors
            yield f"{name}: {risen} new uncorrectable ECC error{'s' if risen > 1 else ''}"
        if old.is_pending is False and new.is_pending:
            yield f"{name}: a part of its memory now waits for its replacement (reset the GPU)"
        if old.is_worn is False and new.is_worn:
            yield f"{name}: remapping a row of its memory failed (replace the GPU)"


def held(before: Mapping[str, GpuState]) -> Iterator[str]:
    """Describe GPUs whose memory others held before the ranks started."""
    for address, gpu in before.items():
        if gpu.used and gpu.total and gpu.used >= HELD * gpu.total:
            yield held_text(gpu.index, address, gpu.used, gpu.total)
