"""A small vision-language model: an image encoder, a projector and a decoder of text."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PATCH = 6  # pixels of a side


class Block(nn.Module):
    """Attend, then think about each place by itself; `is_causal` looks back only."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block; shapes are (batch, places, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Blocks(nn.Sequential):
    """A row of blocks; with `recomputes` a backward pass computes what it needs again."""

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after all of them."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return super().forward(x)
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ImageEncoder(nn.Module):
    """See an image as a row of patches."""

    def __init__(self, side: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.places = (side // PATCH) ** 2
        self.patches = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Embedding(self.places, width)
        self.blocks = Blocks(*(Block(width, heads, is_causal=False) for _ in range(layers)))

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, places, width) for images (batch, 3, side, side)."""
        # Under DeepSpeed the weights themselves are bf16 or fp16; images come as float32.
        seen = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        out: Tensor = self.blocks(seen + self.positions(_up_to(self.places, images)))
        return out


class TextDecoder(nn.Module):
    """Continue a row of things that were seen with words."""

    def __init__(self, words: int, places: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = Blocks(*(Block(width, heads, is_causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, seen: Tensor, words: Tensor) -> Tensor:
        """Return the logits of the word that follows each word: (batch, length, words)."""
        x = torch.cat([seen, self.words(words)], dim=1)
        x = self.blocks(x + self.positions(_up_to(x.shape[1], words)))
        logits: Tensor = self.head(self.norm(x[:, seen.shape[1] :]))
        return logits


class Captioner(nn.Module):
    """Say in words what an image shows; `places` is the most that patches and words may take."""

    _no_split_modules = ("Block",)  # the unit that FSDP wraps, in the words of transformers

    def __init__(self, *, side: int, words: int, places: int, width: int, layers: int) -> None:
        super().__init__()
        # accelerate sizes the "auto" buckets of a DeepSpeed JSON by it.
        self.config = SimpleNamespace(hidden_size=width)
        seen = width // 2  # the encoder is narrower than the decoder, as in the large ones
        self.encoder = ImageEncoder(side, seen, heads=2, layers=layers)
        self.projector = nn.Sequential(nn.Linear(seen, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = TextDecoder(words, places, width, heads=4, layers=layers)
        self.apply(_start_embedding)

    def recompute(self) -> None:
        """Keep the input of each block alone for the backward pass: gradient checkpointing."""
        self.encoder.blocks.recomputes = self.decoder.blocks.recomputes = True

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return the logits of the word that follows each word: (batch, length, words)."""
        logits: Tensor = self.decoder(self.projector(self.encoder(images)), words)
        return logits


def _start_embedding(module: nn.Module) -> None:
    """Start small: torch's own 1.0 would drown what is seen."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _up_to(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)
