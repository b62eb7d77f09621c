"""Defaults for each class of devices: model size, batch, precision and loader."""

from __future__ import annotations

from dataclasses import dataclass

SMALL_GPU_BYTES = 10 << 30
LARGE_GPU_BYTES = 20 << 30


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings of one class of devices.

    `micro_batch` is per rank and pass; `accumulation` passes make a step. That is 32 rows in every
    preset on one device. `precision` is accelerate's value, or auto: bf16, or fp16 on older GPUs.
    With `grad_ckpt` activations are recomputed in the backward pass.
    """

    width: int
    layers: int
    heads: int
    micro_batch: int
    accumulation: int
    precision: str = "auto"
    grad_ckpt: bool = False
    num_workers: int = 4
    pin_memory: bool = True


PRESETS = {
    # the smallest: it sorts within a minute
    "cpu": Preset(
        width=64,
        layers=2,
        heads=4,
        micro_batch=4,
        accumulation=8,
        precision="no",
        num_workers=0,
        pin_memory=False,
    ),
    "small-gpu": Preset(width=128, layers=2, heads=4, micro_batch=8, accumulation=4),
    "gpu": Preset(width=256, layers=3, heads=8, micro_batch=16, accumulation=2),
    "large-gpu": Preset(width=512, layers=6, heads=8, micro_batch=32, accumulation=1),
}


def preset_for(gpu_bytes: int) -> str:
    """Return the preset for the memory of a GPU (0: none): small under 10 GiB, large over 20."""
    if gpu_bytes == 0:
        return "cpu"
    if gpu_bytes < SMALL_GPU_BYTES:
        return "small-gpu"
    return "large-gpu" if gpu_bytes > LARGE_GPU_BYTES else "gpu"
