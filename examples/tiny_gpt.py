"""A byte-level GPT and its windows of training text."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of the model; DeepSpeed's "auto" bucket sizes read `hidden_size`."""

    hidden_size: int
    layers: int
    heads: int
    seq_len: int
    dropout: float


class Block(nn.Module):
    """Attention to earlier bytes, and a feed-forward layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block; shapes are (batch, time, width)."""
        x = x + self.drop(self._attend(self.norm_attention(x)))
        out: Tensor = x + self.drop(self.mlp(self.norm_mlp(x)))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        out: Tensor = self.project(y.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """Predict the next byte."""

    _no_split_modules = ("Block",)  # the unit that FSDP wraps, by transformers' name

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(BYTES, config.hidden_size)
        self.positions = nn.Embedding(config.seq_len, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, BYTES, bias=False)
        self.apply(_start_weights)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each window, in nats per byte: (batch, time) to (batch,)."""
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)


def _start_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def read_corpus(files: Sequence[Path]) -> bytes:
    """Return the bytes of the files; without files, those of Python's documentation topics."""
    if files:
        return b"\n".join(path.read_bytes() for path in files)
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Cut bytes into windows; with a seed they are shuffled, and item g exists for every g >= 0.

    Item g is in epoch ``g // len``, whose order depends only on the seed and the epoch.
    """

    def __init__(self, data: Tensor, starts: Tensor, seq_len: int, seed: int | None) -> None:
        self.data, self.starts, self.seq_len, self.seed = data, starts, seq_len, seed
        self.epoch, self.order = -1, torch.arange(len(starts))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of a window, and for each the next byte."""
        epoch, place = divmod(index, len(self.starts))
        if self.seed is not None and epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.starts), generator=generator)
        start = int(self.starts[self.order[place]])
        window = self.data[start : start + self.seq_len + 1].long()
        return window[:-1], window[1:]


def split_windows(
    corpus: bytes, *, seq_len: int, held_out: int, seed: int
) -> tuple[Windows, Windows]:
    """Return the windows to train on, and about every tenth (at most `held_out`) to test on.

    Raises ValueError for text that is too short.
    """
    count = (len(corpus) - 1) // seq_len
    if count < 10:
        raise ValueError(f"{len(corpus)} bytes of text are fewer than 10 windows of {seq_len}")
    data = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    starts = torch.arange(count) * seq_len
    tests = torch.arange(count) % max(10, math.ceil(count / held_out)) == 0
    return Windows(data, starts[~tests], seq_len, seed), Windows(data, starts[tests], seq_len, None)
