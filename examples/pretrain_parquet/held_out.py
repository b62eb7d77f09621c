"""Evaluate a model on rows outside the training: its loss, and the BLEU of its responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import bleu
import torch
from accelerate import Accelerator
from byte_decoder import NO_TARGET, encode, losses, respond
from parquet_stream import Row, RowGroup, pieces, read
from torch import nn


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The first `rows` of the held-out files; each rank reads its share again each time."""

    accelerator: Accelerator
    groups: list[RowGroup]
    rows: int
    bleu_rows: int
    batch_size: int
    seq_len: int

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss per byte, the same for any number of ranks."""
        plain = self.accelerator.unwrap_model(model).eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for rows in self._batches(self.rows):
                inputs, targets = encode(rows, self.seq_len)
                found = losses(
                    plain(inputs.to(self.accelerator.device)),
                    targets.to(self.accelerator.device),
                )
                count = (targets != NO_TARGET).sum()
                total += torch.stack([found.double().sum().cpu(), count])
        plain.train()
        summed, count = self._sum(total).tolist()
        return float(summed / count)

    def bleu(self, model: nn.Module) -> tuple[float, str]:
        """Return corpus BLEU-4 of greedy responses, and one of them."""
        plain = self.accelerator.unwrap_model(model).eval()
        sums, example = torch.zeros(2 * bleu.LONGEST + 2, dtype=torch.float64), ""
        for rows in self._batches(self.bleu_rows):
            prompts = [prompt for prompt, _ in rows]
            answers = respond(plain, prompts, self.seq_len, self.accelerator.device)
            for (_, reference), answer in zip(rows, answers, strict=True):
                sums += torch.tensor(bleu.count(bleu.tokens(answer), bleu.tokens(reference)))
            example = example or answers[0]
        plain.train()
        return bleu.score([round(value) for value in self._sum(sums).tolist()]), example

    def _batches(self, rows: int) -> Iterator[list[Row]]:
        total = min(rows, sum(group.rows for group in self.groups))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = read(pieces(self.groups, total * rank // world, total * (rank + 1) // world))
        while batch := list(islice(mine, self.batch_size)):
            yield batch

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        device = self.accelerator.device
        summed: torch.Tensor = self.accelerator.reduce(values.to(device), reduction="sum")
        return summed.cpu()
