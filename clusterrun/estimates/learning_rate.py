"""Scale the learning rate with the batch by two rules, for information only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from clusterrun.config.choices import Optimizer

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


def scaled(
    lr: float, base_batch: int, batch: int, *, optimizer: Optimizer = Optimizer.ADAMW
) -> Rates:
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
    if ratio == 1:
        return []
    notes = []
    if ratio > WARMUP_ABOVE:
        notes.append(f"x{ratio:g}: warm the rate up over the first steps ({LINEAR_SOURCE})")
    if largest < SMALL_BATCH:
        notes.append(
            f"batches under {SMALL_BATCH} may need no scaling: try the old rate first;"
            f" the linear rule starts at {SMALL_BATCH} ({LINEAR_SOURCE})"
        )
    if optimizer in (Optimizer.ADAMW, Optimizer.ADAM8BIT):
        notes.append(f"for the Adam family, theory suggests the square root ({SQRT_SOURCE})")
    return notes
