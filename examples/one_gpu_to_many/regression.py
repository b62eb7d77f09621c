"""A small regression that is learned in seconds: generated samples, and the model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

INPUTS = 16
TEACHER_SEED = 20_000  # the target function is the same for every --seed


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Hold `count` samples of a function with some noise; each comes with its index."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, INPUTS, generator=generator)
        noise = 0.01 * torch.randn(count, 1, generator=generator)
        self.targets = teacher(self.inputs) + noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index

    def fingerprint(self) -> str:
        """Return a fingerprint that only the same samples in the same order have."""
        content = self.inputs.numpy().tobytes() + self.targets.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:12]


def teacher(inputs: Tensor) -> Tensor:
    """Return the target: a smooth function of all inputs, (batch, 1)."""
    generator = torch.Generator().manual_seed(TEACHER_SEED)
    directions = torch.randn(INPUTS, 4, generator=generator) / INPUTS**0.5
    return torch.tanh(inputs @ directions).sum(dim=1, keepdim=True)


def student() -> nn.Module:
    """Return the model that learns it."""
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))
