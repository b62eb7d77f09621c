"""Choose settings to start from by the class of the device.

They are rules of thumb, not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clusterrun.config.spec import MixedPrecision
from clusterrun.estimates.inputs import GIB
from clusterrun.estimates.loader import MAX_WORKERS, is_low

LARGE_GPU_BYTES: Final = 20 * GIB


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings to start a training with; `why` maps each setting to its reason.

    All presets have the same effective batch on one device, so they can share a learning rate.
    """

    name: str
    micro_batch: int
    accumulation: int
    precision: MixedPrecision
    grad_ckpt: bool
    num_workers: int
    pin_memory: bool
    why: Mapping[str, str]


_BATCH_WHY: Final = "makes the effective batch 64, as in every preset"
_CPU: Final = Preset(
    name="cpu",
    micro_batch=4,
    accumulation=16,
    precision=MixedPrecision.NO,
    grad_ckpt=False,
    num_workers=0,
    pin_memory=False,
    why={
        "micro_batch": "larger passes gain nothing on a CPU",
        "accumulation": _BATCH_WHY,
        "precision": "fp32: most CPUs have no fast 16-bit arithmetic",
        "grad_ckpt": "recomputing costs time, which is scarce on a CPU; memory is not",
        "num_workers": "workers would take CPUs from the training",
        "pin_memory": "nothing is copied to a GPU",
    },
)
_SMALL: Final = Preset(
    name="small-gpu",
    micro_batch=2,
    accumulation=32,
    precision=MixedPrecision.AUTO,
    grad_ckpt=True,
    num_workers=MAX_WORKERS,
    pin_memory=True,
    why={
        "micro_batch": "activations grow with it, and there is little memory",
        "accumulation": _BATCH_WHY,
        "precision": "16 bits halve the activations; bf16 from compute capability 8.0, else fp16",
        "grad_ckpt": "keeps one activation per block, for a third more work",
        "num_workers": f"one per CPU, at most {MAX_WORKERS}",
        "pin_memory": "copies to the GPU overlap with its work",
    },
)
_LARGE: Final = dataclasses.replace(
    _SMALL,
    name="large-gpu",
    micro_batch=8,
    accumulation=8,
    grad_ckpt=False,
    why={
        **_SMALL.why,
        "micro_batch": "larger passes keep the GPU busy",
        "grad_ckpt": "there is memory for the activations, and recomputing takes time",
    },
)
_LOADER_OFF: Final = {
    "num_workers": "each worker holds a copy of what it loads",
    "pin_memory": "pinned memory can't be swapped out",
}
_LOW_HOST: Final = dataclasses.replace(
    _SMALL,
    name="low-host-memory",
    num_workers=0,
    pin_memory=False,
    why={**_SMALL.why, **_LOADER_OFF},
)
PRESETS: Final[Mapping[str, Preset]] = {
    preset.name: preset for preset in (_CPU, _SMALL, _LARGE, _LOW_HOST)
}


def preset_for(gpu_bytes: int, host_bytes: int = 0) -> Preset:
    """Choose by the memory of a GPU (0: none) and of its host (0: unknown).

    GPUs of up to 20 GiB get small-gpu. On a host under 15 GiB no preset uses workers or pinning.

    >>> preset_for(80 * GIB, 12 * GIB).name, preset_for(80 * GIB, 12 * GIB).num_workers
    ('large-gpu, low-host-memory', 0)
    """
    chosen = _LARGE if gpu_bytes > LARGE_GPU_BYTES else _SMALL if gpu_bytes else _CPU
    if not is_low(host_bytes):
        return chosen
    return dataclasses.replace(
        chosen,
        name=f"{chosen.name}, {_LOW_HOST.name}",
        num_workers=_LOW_HOST.num_workers,
        pin_memory=_LOW_HOST.pin_memory,
        why={**chosen.why, **_LOADER_OFF},
    )
