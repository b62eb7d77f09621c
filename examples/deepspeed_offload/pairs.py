"""Pairs of image and caption: a coloured shape, and four words that describe it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 24  # pixels
MEAN, SPREAD = 0.2, 0.3  # of the pixels, to standardise images
RADIUS = {"small": 3.5, "large": 6.0}
COLOUR = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.9, 0.1),
    "blue": (0.1, 0.2, 1.0),
    "yellow": (1.0, 0.9, 0.1),
    "pink": (1.0, 0.5, 0.8),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("circle", "square", "triangle", "cross")
CENTRE = {"left": (7, 12), "right": (17, 12), "top": (12, 7), "bottom": (12, 17)}
CHOICES = (tuple(RADIUS), tuple(COLOUR), SHAPES, tuple(CENTRE))  # in caption order
WORDS = ("<start>", *(word for choice in CHOICES for word in choice))
START = 0
IGNORED = -100  # fills short captions; cross_entropy ignores it
BY_CHANCE = sum(1 / len(choice) for choice in CHOICES) / len(CHOICES)  # correct words by guessing


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Draw pair g from only the seed and g, for every g >= 0; `length` only ends an epoch."""

    words = WORDS
    digest = ""

    def __init__(self, seed: int, length: int, *, most_words: int = len(CHOICES)) -> None:
        self.seed, self.length = seed, length
        self.longest = min(most_words, len(CHOICES))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a standardised image (3, SIDE, SIDE), and the numbers of its words (longest)."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        caption = [
            choice[int(torch.randint(len(choice), (), generator=chance))] for choice in CHOICES
        ]
        image = (draw(caption, chance) - MEAN) / SPREAD
        return image, torch.tensor([WORDS.index(word) for word in caption[: self.longest]])


def draw(caption: list[str], chance: torch.Generator) -> Tensor:
    """Draw the caption's shape, 0 to 1, about a pixel from its place, on a noisy background."""
    size, colour, shape, place = caption
    moved = torch.tensor(CENTRE[place]) + torch.randint(-1, 2, (2,), generator=chance)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    inside = _is_inside(shape, x - moved[0], y - moved[1], RADIUS[size])
    ground = 0.1 + 0.05 * torch.randn(3, SIDE, SIDE, generator=chance)
    return torch.where(inside, torch.tensor(COLOUR[colour]).view(3, 1, 1), ground)


def _is_inside(shape: str, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Return for each pixel whether it is in the shape around (0, 0); y grows downwards."""
    near, far = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    if shape == "circle":
        return x * x + y * y <= radius * radius
    if shape == "square":
        return far <= 0.8 * radius
    if shape == "cross":
        return (far <= radius) & (near <= radius / 4)
    return (2 * x.abs() <= y + radius) & (y <= 0.8 * radius)
