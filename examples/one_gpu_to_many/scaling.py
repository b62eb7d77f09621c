"""Compute what more processes change: the steps of an epoch, repeated samples, the learning rate.

This needs no torch: `python scaling.py --samples 29500 --batch 4 --ranks 1 2 4 8` prints the table.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

RULES = ("linear", "sqrt", "none")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the path: `ranks` processes share the samples, `batch` of them at a time each.

    A step of the optimizer has `accumulation` passes. Passes and repeats are those of accelerate's
    defaults (`even_batches`, no `drop_last`): it deals whole batches to the ranks in turn, and
    completes the last round with samples of the first one.
    """

    samples: int
    batch: int
    ranks: int
    accumulation: int = 1

    @property
    def effective_batch(self) -> int:
        """Return the samples of one optimizer step."""
        return self.batch * self.accumulation * self.ranks

    @property
    def full_steps(self) -> int:
        """Return the steps of an epoch with new samples only and full batches."""
        return self.samples // self.effective_batch

    @property
    def passes(self) -> int:
        """Return the number of batches of each rank in an epoch."""
        return math.ceil(math.ceil(self.samples / self.batch) / self.ranks)

    @property
    def steps(self) -> int:
        """Return the steps that an epoch actually runs; the last may have fewer passes."""
        return math.ceil(self.passes / self.accumulation)

    @property
    def repeated(self) -> int:
        """Return how many samples the last pass repeats to fill each rank's batch."""
        return self.passes * self.batch * self.ranks - self.samples if self.ranks > 1 else 0

    def new_in_step(self, step: int) -> int:
        """Return how many samples a step of an epoch (from 0) has, without repeats."""
        return min(self.effective_batch, self.samples - step * self.effective_batch)

    def new_in_batch(self, index: int, rank: int) -> int:
        """Return how many samples of a rank's batch of an epoch (from 0) are not repeats."""
        start = (index * self.ranks + rank) * self.batch
        return max(0, min(self.batch, self.samples - start))


def scaled_rate(lr: float, base_batch: int, batch: int, rule: str) -> float:
    """Return the learning rate for a batch, from one that is known to work for `base_batch`.

    linear: Goyal et al. 2017 (arXiv 1706.02677), for SGD. sqrt: Malladi et al. 2022 (arXiv
    2205.10287), for Adam and its kin.
    """
    ratio = batch / base_batch
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def rate_at(step: int, *, base: float, peak: float, warmup: int) -> float:
    """Return the learning rate of a step (from 0): linear from `base` to `peak`, then constant.

    A scaled-up rate needs a warm-up, since it is too high for the first steps.
    """
    if step >= warmup or peak <= base:
        return peak
    return base + (peak - base) * step / warmup


def table(
    samples: int, batch: int, accumulation: int, ranks: list[int], lr: float, base_batch: int
) -> list[str]:
    """Return a header and a line for each number of ranks."""
    lines = ["ranks  batch  full steps  steps run  repeated    linear      sqrt"]
    for count in ranks:
        stage = Stage(samples=samples, batch=batch, ranks=count, accumulation=accumulation)
        rates = (scaled_rate(lr, base_batch, stage.effective_batch, rule) for rule in RULES[:2])
        lines.append(
            f"{count:5}  {stage.effective_batch:5}  {stage.full_steps:10}  {stage.steps:9}  "
            f"{stage.repeated:8}  " + "  ".join(f"{rate:8.2e}" for rate in rates)
        )
    return lines


def count(text: str) -> int:
    """Parse a count of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def rate(text: str) -> float:
    """Parse a learning rate, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a learning rate")
    return value


def parse_arguments() -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--samples", type=count, default=29500)
    add("--batch", type=count, default=4, help="samples per rank and pass (default 4)")
    add("--accumulation", type=count, default=1, help="batches per rank and step (default 1)")
    add("--ranks", type=count, nargs="+", default=[1, 2, 4, 8], metavar="N")
    add("--lr", type=rate, default=1.25e-6, help="the learning rate that works at --base-batch")
    add("--base-batch", type=count, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_arguments()
    print("\n".join(table(**vars(given))))
