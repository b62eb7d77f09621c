"""Choose the settings of a data loader from the allocation, by rules of thumb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clusterrun.estimates.inputs import GIB
from clusterrun.shared.wording import count

MAX_WORKERS: Final = 4
LOW_HOST_BYTES: Final = 15 * GIB


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The settings of one rank's torch DataLoader, and the reason; None if unknown."""

    num_workers: int | None
    pin_memory: bool
    why: str


def advice(cpus_per_rank: int, host_bytes: int, *, is_cpu: bool = False) -> Loader:
    """Choose workers and pinning; `host_bytes` is a node's allocated memory, 0 if unknown.

    `is_cpu`: the training has no GPU.

    >>> advice(2, 64 * GIB)
    Loader(num_workers=2, pin_memory=True, why='one worker per CPU, at most 4: a rank has 2 CPUs')
    """
    if 0 < host_bytes < LOW_HOST_BYTES:
        return Loader(
            num_workers=0,
            pin_memory=False,
            why=f"the host has {host_bytes / GIB:.1f} GiB, less than {LOW_HOST_BYTES // GIB}:"
            " workers copy what they load, and pinned memory can't be swapped",
        )
    if is_cpu:
        why = "workers would take CPUs from the training"
        return Loader(num_workers=0, pin_memory=False, why=why)
    workers = min(MAX_WORKERS, cpus_per_rank) if cpus_per_rank else None
    return Loader(num_workers=workers, pin_memory=True, why=_why(cpus_per_rank))


def _why(cpus: int) -> str:
    rule = f"one worker per CPU, at most {MAX_WORKERS}"
    if not cpus:
        return f"{rule}; pass --cpus-per-task to get a number"
    return f"{rule}: a rank has {count(cpus, 'CPU')}"
