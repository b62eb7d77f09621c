"""What to start with, by the device: size of the model, batch, precision and loader."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_GPU_BYTES = 20 << 30


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings of one class of devices.

    `micro_batch` is of a rank and pass, and `accumulation` passes make a step: 64 rows in every
    preset, on one device. `precision` is accelerate's word, or auto: bf16, or fp16 on older GPUs.
    With `grad_ckpt` activations are computed again in the backward pass, not kept.
    """

    width: int
    layers: int
    heads: int
    micro_batch: int
    accumulation: int
    precision: str
    grad_ckpt: bool
    num_workers: int
    pin_memory: bool


PRESETS = {
    "cpu": Preset(
        width=64,
        layers=2,
        heads=4,
        micro_batch=4,
        accumulation=16,
        precision="no",
        grad_ckpt=False,
        num_workers=0,
        pin_memory=False,
    ),
    "small-gpu": Preset(
        width=256,
        layers=4,
        heads=8,
        micro_batch=2,
        accumulation=32,
        precision="auto",
        grad_ckpt=True,
        num_workers=4,
        pin_memory=True,
    ),
    "large-gpu": Preset(
        width=512,
        layers=8,
        heads=8,
        micro_batch=8,
        accumulation=8,
        precision="auto",
        grad_ckpt=False,
        num_workers=4,
        pin_memory=True,
    ),
}


def preset_for(gpu_bytes: int) -> str:
    """Choose by the memory of a GPU, 0 for none.

    Large has more than 20 GiB. Small is meant for less than 10, and taken up to 20, since it fits.
    """
    if gpu_bytes == 0:
        return "cpu"
    return "large-gpu" if gpu_bytes > LARGE_GPU_BYTES else "small-gpu"
