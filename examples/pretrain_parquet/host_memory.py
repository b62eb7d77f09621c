"""How much memory this job may use and uses, of its host and its GPU, and how to free some."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow
import torch

GIB = 1 << 30
MIB = 1 << 20
HOST_SHARE, GPU_SHARE = 0.7, 0.8  # above, a longer row or another program may be one too many
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


def usage() -> list[int]:
    """Return what this rank has and has had at most, then its GPU's: allocated, reserved, all."""
    own = [resident_bytes(), peak_bytes()]
    if not torch.cuda.is_available():
        return [*own, 0, 0, 0]
    _, gpu = torch.cuda.mem_get_info()
    return [*own, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), gpu]


def lines(step: int, of_ranks: Sequence[Sequence[int]], local: int, limit: Limit) -> list[str]:
    """Tell what the `local` ranks of the first host and the fullest GPU use, and warn of too much.

    `of_ranks` has what `usage` returned on each rank.
    """
    here = of_ranks[:local]
    host, peak = sum(rank[0] for rank in here), sum(rank[1] for rank in here)
    share = host / limit.bytes
    told = f"host {host / 1e6:.0f} MB ({share:.0%} of {limit.bytes / GIB:.1f} GiB)"
    told = f"memory at step {step}: {told}, peak {peak / 1e6:.0f} MB"
    warnings = []
    if share > HOST_SHARE:
        warnings.append(_warning("host", HOST_SHARE, "lower --buffer-rows, or raise --mem"))
    allocated, reserved, gpu = max((rank[2:] for rank in of_ranks), key=lambda of: of[1])
    if gpu:
        share = reserved / gpu
        told += f"; GPU {allocated / GIB:.1f} GiB allocated, {reserved / GIB:.1f} GiB reserved"
        told += f" at most ({share:.0%} of {gpu / GIB:.1f} GiB)"
        if share > GPU_SHARE:
            remedy = "half of --batch-size with twice --accumulation is the same training"
            warnings.append(_warning("GPU", GPU_SHARE, remedy))
    return [told, *warnings]


def _warning(kind: str, share: float, remedy: str) -> str:
    return f"warning: more than {share:.0%} of the {kind} memory is used: {remedy}"


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
