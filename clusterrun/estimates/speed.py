"""Estimate how long a training takes, from its work and the GPU's peak or from a measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clusterrun.errors import UsageError
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import Model, Setup
from clusterrun.estimates.states import trainable_params

MFU: Final = 0.40  # of the peak in passes that fill the GPU; assumed unless a step was measured
MFU_BAND: Final = (0.75, 1.25)  # times MFU: 0.30 to 0.50
# NVIDIA, Matrix Multiplication Background User's Guide: the most efficient tile, and wave
# quantization. On average half of the last wave is lost.
TILE: Final = 256 * 128
LAST_WAVE: Final = 0.5
# Kernels of a block, forward and backward, counted in transformers 5.23's Llama under autocast,
# without and with peft's adapters on all projections. An operation of eager torch takes the CPU 5
# to 25 microseconds.
KERNELS: Final = 154
LORA_KERNELS: Final = 285
LAUNCH_S: Final = 10e-6
GRADIENT_TRAFFIC: Final = 12  # bytes per parameter and pass to add the gradient to the sum
# Speed-up over one GPU, lowest and highest, on GPUs of one node: a rule of thumb.
SCALING: Final[Mapping[int, tuple[float, float]]] = {
    1: (1.0, 1.0),
    2: (1.8, 1.9),
    4: (3.5, 3.8),
    8: (6.5, 7.0),
}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A duration in seconds, from best to worst case. `basis` is "mfu" or "measured"."""

    low_s: float
    mid_s: float
    high_s: float
    basis: str

    def times(self, factor: float) -> Duration:
        """Return the duration times a factor.

        >>> Duration(low_s=1, mid_s=2, high_s=3, basis="mfu").times(1.5).high_s
        4.5
        """
        return Duration(
            low_s=self.low_s * factor,
            mid_s=self.mid_s * factor,
            high_s=self.high_s * factor,
            basis=self.basis,
        )


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The speed-up over one GPU; `note` mentions an interpolation.

    A measured one has `measured_at` (ISO 8601), and is relative to `base` ranks.
    """

    low: float
    high: float
    note: str
    base: int = 1
    measured_at: str = ""


def flops_per_token(model: Model, seq_len: int, *, lora: int = 0) -> float:
    """Return the operations of training on one token: 6P + 12*L*q*s, with q the width of all heads.

    A model with a decoder and an encoder reads as many tokens in each; L counts its attentions.

    With experts, P counts the parameters that the token uses. See PaLM, arXiv:2204.02311, appendix
    B. Attention is omitted if the shape of the model is unknown. Frozen weights need no gradients,
    so LoRA takes 4P; its adapters are not counted. By the definition of MFU, recomputed
    activations never count.
    """
    work = (4 if lora else 6) * (model.active_params or model.params)
    return work + 12 * model.attentions * model.query_width * seq_len


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Return a GPU's peak operations per second; raise UsageError if it lacks the precision."""
    if precision not in gpu.tflops:
        raise UsageError(
            f"the {gpu.name} does not compute in {precision}",
            hint="pass --mixed-precision fp16 or auto",
        )
    return gpu.tflops[precision] * 1e12


def pass_seconds(setup: Setup, gpu: Gpu, mfu: float) -> float:
    """Estimate the seconds that a GPU takes forward and backward over one micro-batch.

    Three costs do not shrink with the batch. The last wave of tiles of each matrix product is half
    full on average. A block's kernels are launched one by one, however small they are. If a step
    has several passes, their gradients are added up in the GPU's memory. Raises UsageError for an
    impossible MFU.
    """
    if not 0 < mfu <= 1:
        raise UsageError(f"an MFU of {mfu:g} is impossible", hint="pass a share, such as --mfu 0.4")
    work_s, waves = _work_seconds(setup, gpu, mfu), _waves(setup, gpu)
    tiled_s = work_s * (1 + LAST_WAVE / waves) if waves else work_s
    launched_s = LAUNCH_S * setup.model.layers * (LORA_KERNELS if setup.lora else KERNELS)
    return recomputing(setup) * max(tiled_s, launched_s) + _summing_seconds(setup, gpu)


def filled(setup: Setup, gpu: Gpu, mfu: float) -> float:
    """Return the share of `mfu` that passes of this size reach; close to 1 for large ones."""
    return recomputing(setup) * _work_seconds(setup, gpu, mfu) / pass_seconds(setup, gpu, mfu)


def reached_mfu(setup: Setup, gpu: Gpu, step_s: float) -> float:
    """Return the MFU of a step of `step_s` seconds."""
    return setup.accumulation * _work_seconds(setup, gpu, 1.0) / step_s


def recomputing(setup: Setup) -> float:
    """Return the work with activation checkpointing (one more forward pass) over that without.

    >>> from clusterrun.estimates.models import BUILT_IN
    >>> llama = BUILT_IN["llama-2-7b"]
    >>> [round(recomputing(Setup(model=llama, grad_ckpt=True, lora=r)), 2) for r in (0, 64)]
    [1.33, 1.5]
    """
    if not setup.grad_ckpt:
        return 1.0
    forward = flops_per_token(setup.model, setup.seq_len) / 3
    return 1 + forward / flops_per_token(setup.model, setup.seq_len, lora=setup.lora)


def _work_seconds(setup: Setup, gpu: Gpu, mfu: float) -> float:
    tokens = setup.micro_batch * setup.seq_len / setup.parallel.model
    work = tokens * flops_per_token(setup.model, setup.seq_len, lora=setup.lora)
    return work / (peak_flops(gpu, setup.precision) * mfu)


def _summing_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds to add up the gradients of a pass: all, or a shard under ZeRO 2 and 3."""
    if setup.accumulation == 1:
        return 0.0
    is_shard = setup.strategy.is_deepspeed and setup.strategy.stage > 1
    summed = trainable_params(setup) / (setup.shards if is_shard else 1)
    return GRADIENT_TRAFFIC * summed / gpu.bandwidth


def _waves(setup: Setup, gpu: Gpu) -> float:
    """Return the waves of tiles in a matrix product as wide as the hidden size."""
    return setup.micro_batch * setup.seq_len * setup.model.hidden / (TILE * gpu.processors)


def measured_time(steps: int, step_s: float) -> Duration:
    """Return the duration of `steps` steps from a measured step.

    >>> [round(measured_time(52_083, step_s).mid_s / 3600, 1) for step_s in (0.5, 0.8)]
    [7.2, 11.6]
    """
    seconds = steps * step_s
    return Duration(low_s=seconds, mid_s=seconds, high_s=seconds, basis="measured")


def speedup(gpus: int, known: Mapping[int, tuple[float, float]] = SCALING) -> Speedup | None:
    """Return the speed-up of several GPUs over one; None outside the known counts.

    >>> speedup(8)
    Speedup(low=6.5, high=7.0, note='', base=1, measured_at='')
    >>> speedup(16) is None
    True
    """
    if gpus in known:
        low, high = known[gpus]
        return Speedup(low=low, high=high, note="")
    below = max((count for count in known if count < gpus), default=None)
    above = min((count for count in known if count > gpus), default=None)
    if below is None or above is None:
        return None
    part = (gpus - below) / (above - below)
    low, high = (a + part * (b - a) for a, b in zip(known[below], known[above], strict=True))
    return Speedup(low=low, high=high, note=f"interpolated between {below} and {above}")


def segments(seconds: float, limit_s: int) -> int:
    """Count the jobs of `limit_s` seconds that a training takes; a tenth is for starts and saves.

    >>> segments(36_000, 39_600), segments(36_001, 39_600)
    (1, 2)
    """
    return math.ceil(seconds * 11 / (limit_s * 10))
