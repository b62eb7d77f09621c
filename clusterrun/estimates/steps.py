"""What a script has to know: the rate of a batch, smaller passes, its data loader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from clusterrun.config.choices import Optimizer
from clusterrun.estimates.inputs import GIB
from clusterrun.shared.wording import count


def smaller_passes(micro_batch: int, accumulation: int) -> tuple[int, int] | None:
    """Return a micro-batch of at most half the size and the accumulation that keeps a step's size.

    >>> smaller_passes(8, 2), smaller_passes(3, 1), smaller_passes(1, 4)
    ((4, 4), (1, 3), None)
    """
    samples = micro_batch * accumulation
    for size in range(micro_batch // 2, 0, -1):
        if samples % size == 0:
            return size, samples // size
    return None


WARMUP_ABOVE: Final = 8  # times the batch that the rate was chosen for
SMALL_BATCH: Final = 256
LINEAR_SOURCE: Final = "Goyal et al., arXiv:1706.02677"
SQRT_SOURCE: Final = "Malladi et al., arXiv:2205.10287"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rate of a batch by each rule, with notes."""

    linear: float
    sqrt: float
    ratio: float
    notes: tuple[str, ...]


def scaled(lr: float, base_batch: int, batch: int, optimizer: Optimizer = Optimizer.ADAMW) -> Rates:
    """Scale a learning rate from the effective batch `base_batch` to `batch`.

    >>> rates = scaled(1.25e-6, 4, 16)
    >>> rates.linear, rates.sqrt, rates.ratio
    (5e-06, 2.5e-06, 4.0)
    """
    ratio = batch / base_batch
    return Rates(
        linear=lr * ratio,
        sqrt=lr * math.sqrt(ratio),
        ratio=ratio,
        notes=tuple(_notes(ratio, max(base_batch, batch), optimizer)),
    )


def _notes(ratio: float, largest: int, optimizer: Optimizer) -> list[str]:
    """Return advice for a batch that grew by `ratio`; `largest` is the larger of both batches."""
    if ratio == 1:
        return []
    notes = []
    if ratio > WARMUP_ABOVE:
        notes.append(f"x{ratio:g}: warm the rate up over the first steps ({LINEAR_SOURCE})")
    if largest < SMALL_BATCH:
        text = f"batches under {SMALL_BATCH} may need no scaling: try the old rate first"
        notes.append(f"{text}; the linear rule starts at {SMALL_BATCH} ({LINEAR_SOURCE})")
    if optimizer in (Optimizer.ADAMW, Optimizer.ADAM8BIT):
        notes.append(f"for the Adam family, theory suggests the square root ({SQRT_SOURCE})")
    return notes


MAX_WORKERS: Final = 4
LOW_HOST_BYTES: Final = 15 * GIB


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The settings of one rank's torch DataLoader, and the reason; None if unknown."""

    num_workers: int | None
    pin_memory: bool
    why: str


def advice(cpus_per_rank: int | None, host_bytes: int | None, *, is_cpu: bool = False) -> Loader:
    """Choose workers and pinning; `host_bytes` is a node's allocated memory. None: unknown.

    >>> advice(2, 64 * GIB)
    Loader(num_workers=2, pin_memory=True, why='one worker per CPU, at most 4: a rank has 2 CPUs')
    """
    if host_bytes and host_bytes < LOW_HOST_BYTES:
        lack = f"the host has {host_bytes / GIB:.1f} GiB, less than {LOW_HOST_BYTES // GIB}"
        why = f"{lack}: workers copy what they load, and pinned memory can't be swapped"
        return Loader(num_workers=0, pin_memory=False, why=why)
    if is_cpu:
        why = "workers would take CPUs from the training"
        return Loader(num_workers=0, pin_memory=False, why=why)
    why = f"one worker per CPU, at most {MAX_WORKERS}"
    if not cpus_per_rank:
        why += "; pass --cpus-per-task to get a number"
        return Loader(num_workers=None, pin_memory=True, why=why)
    why += f": a rank has {count(cpus_per_rank, 'CPU')}"
    return Loader(num_workers=min(MAX_WORKERS, cpus_per_rank), pin_memory=True, why=why)
