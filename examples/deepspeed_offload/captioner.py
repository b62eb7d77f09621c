"""A small vision-language model: an image encoder, a projector and a text decoder."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PATCH = 6  # pixels per side


class Block(nn.Module):
    """Attention and a feed-forward layer; `is_causal` attends only to earlier places."""

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
    """A sequence of blocks; with `recomputes` the backward pass recomputes activations."""

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after all blocks."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return super().forward(x)
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ImageEncoder(nn.Module):
    """Encode an image as a sequence of patches."""

    def __init__(self, side: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.places = (side // PATCH) ** 2
        self.patches = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Embedding(self.places, width)
        self.blocks = Blocks(*(Block(width, heads, is_causal=False) for _ in range(layers)))

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, places, width) for images (batch, 3, side, side)."""
        # Under DeepSpeed the weights are bf16 or fp16; images are float32.
        seen = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        out: Tensor = self.blocks(seen + self.positions(_up_to(self.places, images)))
        return out


class TextDecoder(nn.Module):
    """Continue a sequence of encoded patches with words."""

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
    """Caption an image; `places` is the maximum number of patches and words."""

    _no_split_modules = ("Block",)  # the unit that FSDP wraps, by transformers' name

    def __init__(self, *, side: int, words: int, places: int, width: int, layers: int) -> None:
        super().__init__()
        # accelerate derives the "auto" buckets of a DeepSpeed JSON from it.
        self.config = SimpleNamespace(hidden_size=width)
        seen = width // 2  # the encoder is narrower than the decoder, as in large models
        self.encoder = ImageEncoder(side, seen, heads=2, layers=layers)
        self.projector = nn.Sequential(nn.Linear(seen, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = TextDecoder(words, places, width, heads=4, layers=layers)
        self.apply(_start_embedding)

    def recompute(self) -> None:
        """Keep only the input of each block for the backward pass: gradient checkpointing."""
        self.encoder.blocks.recomputes = self.decoder.blocks.recomputes = True

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return the logits of the word that follows each word: (batch, length, words)."""
        logits: Tensor = self.decoder(self.projector(self.encoder(images)), words)
        return logits


def _start_embedding(module: nn.Module) -> None:
    """Initialise with small values: torch's 1.0 would outweigh the image."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _up_to(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)
