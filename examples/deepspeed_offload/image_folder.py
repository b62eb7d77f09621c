"""Read images of a folder, with captions from a JSON file like LLaVA's, or write such a folder.

`python image_folder.py DIR` draws images into DIR/images and their captions into DIR/captions.json.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from pairs import IGNORED, MEAN, SIDE, SPREAD, Pairs
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """The entries of `data_path` without the last `held_out`, or only those; images load lazily.

    Entry g of a training depends only on the seed and g: each epoch has a different order.
    Raises ValueError for a file without such entries, or with too few.
    """

    def __init__(
        self, folder: Path, data_path: Path, *, most_words: int, held_out: int, seed: int | None
    ) -> None:
        entries = [(folder / name, caption.split()) for name, caption in read_captions(data_path)]
        if len(entries) <= held_out:
            raise ValueError(f"{data_path}: {len(entries)} images, but {held_out} are held out")
        if missing := missing_images([path for path, _ in entries]):
            raise ValueError(
                f"{len(missing)} of {len(entries)} images do not exist, the first {missing[0]}"
            )
        spoken = sorted({word for _, caption in entries for word in caption})
        self.words = ("<start>", *spoken)
        self.longest = min(most_words, max(len(caption) for _, caption in entries))
        self.entries = entries[-held_out:] if seed is None else entries[:-held_out]
        told = data_path.read_bytes() + f"less {held_out}".encode()
        self.digest = hashlib.sha256(told).hexdigest()
        self.seed = seed

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a standardised image (3, SIDE, SIDE), and the numbers of its words (longest)."""
        epoch, place = divmod(index, len(self.entries))
        order = range(len(self)) if self.seed is None else shuffled(len(self), self.seed + epoch)
        path, caption = self.entries[order[place]]
        with Image.open(path) as image:
            pixels = image.convert("RGB").resize((SIDE, SIDE)).tobytes()
        seen = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(SIDE, SIDE, 3)
        words = [self.words.index(word) for word in caption[: self.longest]]
        padding = [IGNORED] * (self.longest - len(words))
        return (seen.permute(2, 0, 1) / 255 - MEAN) / SPREAD, torch.tensor(words + padding)


def missing_images(paths: list[Path]) -> list[Path]:
    """Return the images that do not exist; list each directory once."""
    there = {path.parent: set[str]() for path in paths}
    for folder, names in there.items():
        if folder.is_dir():
            names.update(os.listdir(folder))
    return [path for path in paths if path.name not in there[path.parent]]


@functools.lru_cache(maxsize=2)
def shuffled(count: int, seed: int) -> list[int]:
    """Return the order of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def read_captions(data_path: Path) -> list[tuple[str, str]]:
    """Return the image name and caption of each entry: the "gpt" part of its conversation."""
    try:
        entries = json.loads(data_path.read_text())
        return [(str(entry["image"]), _answer(entry["conversations"])) for entry in entries]
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(
            f'{data_path} is not a list of {{"image": NAME, "conversations": [{{"from": "human", '
            f'"value": "<image>"}}, {{"from": "gpt", "value": CAPTION}}]}}: {error!r}'
        ) from error


def _answer(turns: list[dict[str, Any]]) -> str:
    return next(turn["value"] for turn in turns if turn["from"] == "gpt" and turn["value"].split())


def write(folder: Path, count: int, seed: int) -> None:
    """Draw images, and write them with their captions."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    pairs, entries = Pairs(seed, count), []
    for index in range(count):
        image, words = pairs[index]
        pixels = ((image * SPREAD + MEAN).clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
        name = f"{index:06d}.png"
        Image.fromarray(pixels.contiguous().numpy()).save(folder / "images" / name)
        turns = [
            {"from": "human", "value": "<image>\nWhat is to be seen?"},
            {"from": "gpt", "value": " ".join(pairs.words[word] for word in words)},
        ]
        entries.append({"id": str(index), "image": name, "conversations": turns})
    (folder / "captions.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a folder of images, and their captions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="images (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.count, arguments.seed)
