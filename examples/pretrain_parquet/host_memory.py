"""How much memory this job may use on its host, how much it uses, and how to give some back."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow
import torch

GIB = 1 << 30
MIB = 1 << 20
LOW_MEMORY = 15 * GIB  # below, a loader's workers and pinned batches are memory that is missed


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the host's memory may be, and who says so."""

    bytes: int
    source: str


def find_limit(
    environ: Mapping[str, str],
    *,
    own_groups: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
) -> Limit:
    """Return the least of what the machine has, Slurm has granted and the control group allows."""
    limits = [Limit(bytes=psutil.virtual_memory().total, source="machine")]
    limits += _slurm_limits(environ)
    limits += _group_limits(own_groups, groups)
    return min(limits, key=lambda limit: limit.bytes)


def loader_workers(limit: Limit) -> int:
    """Return how many processes read ahead: more than one would each read the same stream."""
    return 0 if limit.bytes < LOW_MEMORY else 1


def resident_bytes() -> int:
    """Return the memory of this process and of the loader's worker."""
    own, total = psutil.Process(), 0
    for process in [own, *own.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends with its epoch
            total += process.memory_info().rss
    return total


def peak_bytes() -> int:
    """Return the most that this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clear_caches() -> None:
    """Give back what Python, pyarrow and torch keep for later."""
    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _slurm_limits(environ: Mapping[str, str]) -> Iterator[Limit]:
    """Read Slurm's variables (MiB, see srun(1)); 0 stands for all memory of the node."""
    node = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    cpu = int(environ.get("SLURM_MEM_PER_CPU") or 0) * int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    for size, source in ((node, "SLURM_MEM_PER_NODE"), (cpu, "SLURM_MEM_PER_CPU")):
        if size:
            yield Limit(bytes=size * MIB, source=source)


def _group_limits(own_groups: Path, groups: Path) -> Iterator[Limit]:
    """Read the limits of this process's control group and those above it, of either version."""
    lines = own_groups.read_text().splitlines() if own_groups.exists() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            text = (folder / name).read_text().strip() if (folder / name).exists() else ""
            if text.isdigit():
                yield Limit(bytes=int(text), source="cgroup")
            if folder == top:
                break
