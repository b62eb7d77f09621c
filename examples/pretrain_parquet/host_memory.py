"""Find the memory limit and usage of this job on its host and GPU, and free memory."""

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
HOST_SHARE, GPU_SHARE = 0.7, 0.8  # above, a longer row or another program may not fit
LOW_MEMORY = 15 * GIB  # below, there is no room for a loader's workers and pinned batches


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit of the host's memory, and where it comes from."""

    bytes: int
    source: str


def find_limit(
    environ: Mapping[str, str],
    *,
    own_groups: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
) -> Limit:
    """Return the lowest of the limits of the machine, of Slurm and of the control group."""
    limits = [Limit(bytes=psutil.virtual_memory().total, source="machine")]
    limits += _slurm_limits(environ)
    limits += _group_limits(own_groups, groups)
    return min(limits, key=lambda limit: limit.bytes)


def loader_workers(limit: Limit) -> int:
    """Return the number of loader processes, at most 1: each would read the same stream."""
    return 0 if limit.bytes < LOW_MEMORY else 1


def resident_bytes() -> int:
    """Return the resident memory of this process and of the loader's worker."""
    own, total = psutil.Process(), 0
    for process in [own, *own.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends with its epoch
            total += process.memory_info().rss
    return total


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def usage() -> list[int]:
    """Return this rank's current and peak memory, then its GPU's: allocated, reserved, total."""
    own = [resident_bytes(), peak_bytes()]
    if not torch.cuda.is_available():
        return [*own, 0, 0, 0]
    _, gpu = torch.cuda.mem_get_info()
    return [*own, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), gpu]


def lines(step: int, of_ranks: Sequence[Sequence[int]], local: int, limit: Limit) -> list[str]:
    """Return lines on the memory of the first host's `local` ranks and the fullest GPU.

    `of_ranks` is the result of `usage` on each rank. A limit that is nearly reached adds a warning.
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
            remedy = "use half of --batch-size and twice --accumulation for the same training"
            warnings.append(_warning("GPU", GPU_SHARE, remedy))
    return [told, *warnings]


def _warning(kind: str, share: float, remedy: str) -> str:
    return f"warning: more than {share:.0%} of the {kind} memory is used: {remedy}"


def clear_caches() -> None:
    """Release the memory that Python, pyarrow and torch cache."""
    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _slurm_limits(environ: Mapping[str, str]) -> Iterator[Limit]:
    """Yield the limits in Slurm's variables (MiB, see srun(1)); 0 means the node's whole memory."""
    node = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    cpu = int(environ.get("SLURM_MEM_PER_CPU") or 0) * int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    for size, source in ((node, "SLURM_MEM_PER_NODE"), (cpu, "SLURM_MEM_PER_CPU")):
        if size:
            yield Limit(bytes=size * MIB, source=source)


def _group_limits(own_groups: Path, groups: Path) -> Iterator[Limit]:
    """Yield the limits of this process's control group and its parents, of either version."""
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
