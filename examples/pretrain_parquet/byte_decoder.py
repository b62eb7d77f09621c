"""A small byte-level decoder: rows as tensors, the model and its responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from parquet_stream import Row, Stream
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

BYTES = 256
ANSWER, END = 0xFE, 0xFF  # the begin and end of a response; neither occurs in UTF-8
NO_TARGET = -100  # cross_entropy ignores it
Batch = tuple[Tensor, Tensor]


def encode(rows: Sequence[Row], seq_len: int) -> Batch:
    """Return inputs and targets, (rows, time); long rows are truncated, short ones padded."""
    texts = [
        [*prompt.encode(), ANSWER, *response.encode(), END][: seq_len + 1]
        for prompt, response in rows
    ]
    width = max(len(text) for text in texts) - 1
    inputs = torch.full((len(texts), width), END)
    targets = torch.full((len(texts), width), NO_TARGET)
    for n, text in enumerate(texts):
        inputs[n, : len(text) - 1] = torch.tensor(text[:-1])
        targets[n, : len(text) - 1] = torch.tensor(text[1:])
    return inputs, targets


class Batches(IterableDataset[Batch]):
    """The batches of one rank in one epoch, starting at a step."""

    def __init__(
        self, stream: Stream, epoch: int, step: int, *, batch_size: int, seq_len: int
    ) -> None:
        self.stream, self.epoch, self.step = stream, epoch, step
        self.batch_size, self.seq_len = batch_size, seq_len

    def __iter__(self) -> Iterator[Batch]:
        rows = self.stream.rows(self.epoch, self.step)
        while batch := list(islice(rows, self.batch_size)):
            yield encode(batch, self.seq_len)


def loader(batches: Batches, *, workers: int, device: torch.device) -> DataLoader[Batch]:
    """Return a loader with one worker and pinned memory, or with neither."""
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        pin_memory=workers > 0 and device.type == "cuda",
        # A loader draws a seed when it starts: a separate generator keeps torch's state unchanged.
        generator=torch.Generator().manual_seed(0),
    )


class Decoder(nn.Module):
    """Predict the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(seq_len, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the byte after each: (rows, time) to (rows, time, 256)."""
        time = inputs.shape[1]
        x = self.bytes(inputs) + self.positions(torch.arange(time, device=inputs.device))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=inputs.device)
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True)).float()
        return logits


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each byte in nats; 0 for bytes without a target."""
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none"
    )


@torch.no_grad()
def respond(
    model: nn.Module, prompts: Sequence[str], seq_len: int, device: torch.device
) -> list[str]:
    """Return the most likely response to each prompt, byte by byte."""
    texts = [[*prompt.encode(), ANSWER][:seq_len] for prompt in prompts]
    begins = torch.tensor([len(text) for text in texts], device=device)
    places, rows = begins.clone(), torch.arange(len(texts), device=device)
    x = torch.full((len(texts), seq_len + 1), END, device=device)
    for n, text in enumerate(texts):
        x[n, : len(text)] = torch.tensor(text)
    is_open = torch.ones(len(texts), dtype=torch.bool, device=device)
    while is_open.any():
        logits = model(x[:, : int(places.max())])  # bytes after a place don't affect it
        following = logits[rows, places - 1].argmax(dim=1)
        x[rows[is_open], places[is_open]] = following[is_open]
        is_open &= (following != END) & (places < seq_len)
        places += is_open
    answers = [row[int(begin) :].tolist() for row, begin in zip(x, begins, strict=True)]
    return [
        bytes(answer[: answer.index(END)] if END in answer else answer).decode(errors="replace")
        for answer in answers
    ]
