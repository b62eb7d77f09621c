"""Choose settings to start from by the class of the device.

They are rules of thumb, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clusterrun.config.choices import MixedPrecision
from clusterrun.estimates.inputs import GIB
from clusterrun.shared.wording import count

LARGE_GPU_BYTES: Final = 20 * GIB
BATCH: Final = 64


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings to start a training with.

    All presets have the same effective batch on one device, so they can share a learning rate.
    """

    name: str
    micro_batch: int
    accumulation: int
    precision: MixedPrecision
    grad_ckpt: bool


PRESETS: Final = {
    name: Preset(
        name=name,
        micro_batch=micro_batch,
        accumulation=BATCH // micro_batch,
        precision=MixedPrecision.NO if name == "cpu" else MixedPrecision.AUTO,
        grad_ckpt=name == "small-gpu",
    )
    for name, micro_batch in {"cpu": 4, "small-gpu": 2, "large-gpu": 8}.items()
}


def preset_for(gpu_bytes: int) -> Preset:
    """Choose by the memory of a GPU (0: none); GPUs of up to 20 GiB get small-gpu.

    >>> preset_for(80 * GIB).name
    'large-gpu'
    """
    size = "large-gpu" if gpu_bytes > LARGE_GPU_BYTES else "small-gpu"
    return PRESETS[size if gpu_bytes else "cpu"]


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
    has = f": a rank has {count(cpus_per_rank, 'CPU')}"
    more = has if cpus_per_rank else "; pass --cpus-per-task to get a number"
    why = f"one worker per CPU, at most {MAX_WORKERS}{more}"
    return Loader(num_workers=workers, pin_memory=True, why=why)
