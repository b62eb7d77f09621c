"""Model and data, small enough for a CPU: two thin layers learn to imitate one wide layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 128
SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `--config` selects."""

    rank: int
    lr: float
    batch: int = 32
    epochs: int = 2


CONFIGS = {
    "paper_r8": Config(rank=8, lr=1e-2),
    "paper_r64": Config(rank=64, lr=3e-3),
}


def make_model(config: Config) -> nn.Module:
    """Return the model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, config.rank, bias=False), nn.Linear(config.rank, WIDTH, bias=False)
    )


def make_data() -> TensorDataset:
    """Return the samples, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs @ wide)
