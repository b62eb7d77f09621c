"""Sort digits: the rows, and a Transformer that learns the task in a minute."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

DIGITS = 10
HELD_OUT = range(1 << 32, (1 << 32) + 256)  # the rows to test on; no training gets this far


class Rows(Dataset[Tensor]):
    """Rows of random digits; each depends only on the seed and its number."""

    def __init__(self, numbers: range, *, length: int, seed: int) -> None:
        self.numbers, self.length, self.seed = numbers, length, seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed << 40) + self.numbers[index])
        return torch.randint(DIGITS, (self.length,), generator=generator)


class Sorter(nn.Module):
    """Predict for each place the digit of the sorted row."""

    def __init__(
        self, *, length: int, width: int, layers: int, heads: int, grad_ckpt: bool
    ) -> None:
        super().__init__()
        self.grad_ckpt = grad_ckpt
        self.digits = nn.Embedding(DIGITS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, rows: Tensor) -> Tensor:
        """Return scores: rows of digits (batch, length) to (batch, length, 10)."""
        x = self.digits(rows) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.grad_ckpt else block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def loss_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Return the mean loss over all places, in nats."""
    wanted = rows.sort(dim=1).values
    return functional.cross_entropy(scores.float().flatten(0, 1), wanted.flatten())


def is_right(scores: Tensor, rows: Tensor) -> Tensor:
    """Return for each row whether all of it is sorted, (batch,)."""
    return (scores.argmax(dim=2) == rows.sort(dim=1).values).all(dim=1)
