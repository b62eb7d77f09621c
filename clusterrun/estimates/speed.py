"""Estimate the duration of a training, by arithmetic and peak or by a measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clusterrun.errors import UsageError
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import Model, Setup

MFU: Final = 0.40  # of the peak; assumed where nothing was measured
MFU_BAND: Final = (0.75, 1.25)  # times that: 0.30 to 0.50
# Speed-up over one GPU, lowest and highest, on GPUs of one node: a rule of thumb.
SCALING: Final[Mapping[int, tuple[float, float]]] = {
    1: (1.0, 1.0),
    2: (1.8, 1.9),
    4: (3.5, 3.8),
    8: (6.5, 7.0),
}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds that something takes, from best to worst case. `basis` is "mfu" or "measured"."""

    low_s: float
    mid_s: float
    high_s: float
    basis: str

    def times(self, factor: float) -> Duration:
        """Return how long so many of it take.

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
    """How much faster than one GPU; `note` mentions an interpolation.

    One that was measured has `measured_at` (ISO 8601), and is over as many ranks as `base` says.
    """

    low: float
    high: float
    note: str
    base: int = 1
    measured_at: str = ""


def flops_per_token(model: Model, seq_len: int, *, lora: int = 0) -> float:
    """Count the operations that training on one token takes: 6P + 12*L*q*s, q all heads' width.

    With experts, P are the parameters that work on the token. See PaLM, arXiv:2204.02311, appendix
    B. The part of attention is omitted if the shape of the model is unknown. Frozen weights need no
    gradients, so LoRA takes 4P, without its adapters. By the definition of MFU, recomputed
    activations never count.
    """
    per_param = 4 if lora else 6
    work = per_param * (model.active_params or model.params)
    return work + 12 * model.layers * model.query_width * seq_len


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Return a GPU's peak per second; raise UsageError if it lacks the precision."""
    if precision not in gpu.tflops:
        raise UsageError(
            f"the {gpu.name} does not compute in {precision}",
            hint=f"it has {' and '.join(sorted(gpu.tflops))}: see --mixed-precision",
        )
    return gpu.tflops[precision] * 1e12


def epoch_time(setup: Setup, gpu: Gpu, tokens: int, *, mfu: float = MFU) -> Duration:
    """Estimate the time that one pass over `tokens` takes (samples x their length).

    Raises UsageError for an MFU that can't be.
    """
    if not 0 < mfu <= 1:
        raise UsageError(f"an MFU of {mfu:g} can't be", hint="give a share of the peak, as 0.4")
    work = tokens * flops_per_token(setup.model, setup.seq_len, lora=setup.lora)
    mid_s = work / (setup.world * peak_flops(gpu, setup.precision) * mfu)
    unlucky, lucky = MFU_BAND
    return Duration(low_s=mid_s / lucky, mid_s=mid_s, high_s=mid_s / unlucky, basis="mfu")


def measured_time(steps: int, step_s: float) -> Duration:
    """Return how long steps take of which one was measured.

    >>> [round(measured_time(52_083, step_s).mid_s / 3600, 1) for step_s in (0.5, 0.8)]
    [7.2, 11.6]
    """
    seconds = steps * step_s
    return Duration(low_s=seconds, mid_s=seconds, high_s=seconds, basis="measured")


def speedup(gpus: int, known: Mapping[int, tuple[float, float]] = SCALING) -> Speedup | None:
    """Return how much faster than one GPU several are; None beyond the known counts.

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
    """Count the jobs of a time limit that a training takes, with a tenth for starts and saves.

    >>> segments(36_000, 39_600), segments(36_001, 39_600)
    (1, 2)
    """
    return math.ceil(seconds * 11 / (limit_s * 10))
