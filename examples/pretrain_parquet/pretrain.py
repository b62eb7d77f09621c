"""Pretrain a small decoder on a parquet set of any size, with little memory on the host.

`DATA/train/*.parquet` and `DATA/held_out/*.parquet` have columns `prompt` and `response`. They are
streamed: no rank ever holds more than a shuffle buffer of them. A step is an optimizer step, and
determines the place in the data: a resumed run continues with the next row.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import host_memory
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from byte_decoder import NO_TARGET, Batch, Batches, Decoder, loader, losses
from held_out import HeldOut
from parquet_stream import DataError, Stream, find_row_groups, fingerprint
from saved import OVERRIDABLE, Saved, best
from torch import Tensor, nn

from clusterrun import runtime

# With --large: 10 million rows on three GPUs of 20 GB. The README explains the values.
LARGE = {
    "epochs": 3,
    "batch_size": 32,
    "accumulation": 2,
    "buffer_rows": 5000,
    "seq_len": 192,
    "layers": 15,
    "heads": 16,
    "width": 1024,
    "lr": 1e-4,
    "warmup": 1024,
    "log_every": 100,
    "save_every": 5000,
}
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def say(line: str) -> None:
    """Print a line with a single write, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(kw_only=True)
class Training:
    """A training after `step` steps; `seen` holds the losses since the last print."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    stream: Stream
    limit: host_memory.Limit
    held_out: HeldOut
    saved: Saved
    step: int = 0
    seen: list[Tensor] = field(default_factory=list)

    @property
    def total_steps(self) -> int:
        """Return the steps of all epochs."""
        return int(self.args.epochs * self.stream.steps_per_epoch)

    @property
    def place(self) -> tuple[int, int]:
        """Return the epoch, and how many steps of it are done."""
        return divmod(self.step, self.stream.steps_per_epoch)

    def run(self) -> bool:
        """Take the remaining steps; return False if the job asked to save and exit."""
        while self.step < self.total_steps:
            batches = iter(self.rest_of_epoch())
            while step := list(islice(batches, self.args.accumulation)):
                self.take_step(step)
                self.step += 1
                self.report()
                if self.save() and self.step < self.total_steps:
                    self.say(f"stopped at step {self.step}")
                    return False
        return True

    def rest_of_epoch(self) -> Iterable[Batch]:
        """Return the remaining batches of this rank in the epoch."""
        args = self.args
        batches = Batches(
            self.stream, *self.place, batch_size=args.batch_size, seq_len=args.seq_len
        )
        workers = host_memory.loader_workers(self.limit)
        return loader(batches, workers=workers, device=self.accelerator.device)

    def take_step(self, batches: Sequence[Batch]) -> None:
        """Learn from the micro-batches of one step; its loss is the mean over all target bytes.

        So each byte has the same weight, however the effective batch is divided.
        """
        accelerator, device = self.accelerator, self.accelerator.device
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(1.0, (self.step + 1) / self.args.warmup)
        own = torch.stack([(targets != NO_TARGET).sum() for _, targets in batches]).sum()
        count = accelerator.reduce(own.to(device), reduction="sum")
        # DDP averages over ranks, and accelerate over micro-batches.
        share = accelerator.num_processes * len(batches) / count
        for inputs, targets in batches:
            with accelerator.accumulate(self.model):
                summed = losses(self.model(inputs.to(device)), targets.to(device)).sum()
                accelerator.backward(summed * share)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seen.append(summed.detach() * share)

    def report(self) -> None:
        """Print what is due after a step, and release memory."""
        args, step = self.args, self.step
        runtime.step(step, self.total_steps)
        if step % args.log_every == 0:
            self.report_loss()
        if step % args.clear_every == 0:
            host_memory.clear_caches()
        if step % args.memory_every == 0:
            self.report_memory()
        if step % self.stream.steps_per_epoch == 0:
            score, example = self.held_out.bleu(self.model)
            epoch = step // self.stream.steps_per_epoch
            self.say(f"epoch {epoch}/{args.epochs} BLEU {score:.1f}, as in {example!r}")

    def report_memory(self) -> None:
        """Release memory, and print what is still in use."""
        host_memory.clear_caches()
        own = torch.tensor([host_memory.usage()], device=self.accelerator.device)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        of_ranks = self.accelerator.gather(own).tolist()
        for line in host_memory.lines(self.step, of_ranks, local, self.limit):
            self.say(line)

    def report_loss(self) -> None:
        """Print the mean loss of all ranks; stop a training whose loss is not finite."""
        loss = float(self.accelerator.reduce(torch.stack(self.seen).mean(), reduction="mean"))
        self.seen.clear()
        self.say(f"step {self.step}/{self.total_steps} loss {loss:.3f}")
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {self.step}: it has diverged")

    def save(self) -> bool:
        """Save if it is due or requested; return whether to exit."""
        asked, loss = runtime.should_checkpoint(), None
        per_epoch = self.stream.steps_per_epoch
        is_due = self.step % self.args.save_every == 0 or self.step % per_epoch == 0
        if is_due and not asked:  # a request leaves no time
            loss = self.held_out.loss(self.model)
            self.say(f"held-out loss {loss:.4f} at step {self.step}")
        if (is_due or asked) and (path := self.saved.save(self.step, loss)):
            self.say(f"saved {path}")
        return runtime.should_stop()

    def say(self, line: str) -> None:
        """Print a line on one rank only."""
        if self.accelerator.is_main_process:
            say(line)


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed."""
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    if accelerator.distributed_type not in WHOLE:
        kind = accelerator.distributed_type.value
        raise SystemExit(
            f"error: this example trains in one process or under DDP, not {kind}\n"
            "  hint: use --strategy ddp"
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but accelerate did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    args.accumulation = accelerator.gradient_accumulation_steps  # the launcher may decide it
    train(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last epoch, and report."""
    set_seed(args.seed)
    training = prepare(accelerator, args)
    stream, total = training.stream, training.total_steps
    world, rows = stream.world_size, stream.effective_batch
    training.say(f"world {world} ranks, {rows} rows a step, {total} steps in all")
    training.step = training.saved.load()
    if args.resume and not training.step and runtime.checkpoint_dir() is None:
        raise SystemExit(
            f"error: {args.output} has no complete checkpoint to resume from\n"
            "  hint: check --output, or start anew without --resume (--is_keep_training)"
        )
    if training.step >= total:
        training.say(f"nothing is left to do: step {training.step} is saved")
    elif training.step:
        where = stream.beginning(*training.place)
        say(f"resumed at step {training.step}: rank {stream.rank} reads on from {where}")
    if training.run():
        for path, loss in best(training.saved.best).items():
            training.say(f"kept best/{path.name}, held-out loss {loss:.4f}")


def prepare(accelerator: Accelerator, args: argparse.Namespace) -> Training:
    """Find the data, choose a loader, and build the model."""
    groups, tests = (find_row_groups(args.data / part) for part in ("train", "held_out"))
    world_size = accelerator.num_processes
    effective_batch = args.batch_size * args.accumulation * world_size
    shape = {name: getattr(args, name) for name in ("width", "layers", "heads", "seq_len")}
    settings = shape | {name: getattr(args, name) for name in ("buffer_rows", "lr", "warmup")}
    settings |= {"data": fingerprint(groups), "precision": accelerator.mixed_precision}
    settings |= {"effective_batch": effective_batch, "seed": args.seed}
    saved = Saved(
        accelerator,
        args.output,
        keep=args.keep,
        best=args.keep_best,
        settings=settings,
        override=args.override,
    )
    stream = Stream(
        groups=groups,
        rank=accelerator.process_index,
        world_size=world_size,
        lanes=saved.lanes,
        effective_batch=effective_batch,
        buffer_rows=args.buffer_rows,
        seed=args.seed,
    )
    model = Decoder(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    held_out = HeldOut(
        accelerator=accelerator,
        groups=tests,
        rows=args.held_out,
        bleu_rows=args.bleu_rows,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
    )
    return Training(
        accelerator=accelerator,
        args=args,
        model=model,
        optimizer=optimizer,
        stream=stream,
        limit=host_limit(args, accelerator),
        held_out=held_out,
        saved=saved,
    )


def host_limit(args: argparse.Namespace, accelerator: Accelerator) -> host_memory.Limit:
    """Return the host's memory limit for this job; print it and how rows are loaded."""
    limit = host_memory.find_limit(os.environ)
    if args.host_memory:
        limit = host_memory.Limit(bytes=int(args.host_memory * host_memory.GIB), source="given")
    if accelerator.is_main_process:
        has_worker = host_memory.loader_workers(limit) > 0
        how = "a worker reads ahead" if has_worker else "no workers, no pinned memory"
        say(f"host memory {limit.bytes / host_memory.GIB:.1f} GiB ({limit.source}): {how}")
    return limit


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=["train"], help="accepted and ignored")
    add(
        *("--large", "--use_large_config"),
        **SWITCH,
        help="other defaults: 10 million rows on three GPUs of 20 GB",
    )
    add(
        *("--resume", "--is_keep_training"),
        **SWITCH,
        choices=[True],
        help="refuse to start without a checkpoint; an existing one is always resumed",
    )
    add("--data", type=Path, default="data", help="directory with train/ and held_out/")
    add(
        "--output",
        type=folder,
        default=None if runtime.checkpoint_dir() else "out",
        help="checkpoint directory (default: that of the run)",
    )
    add("--epochs", type=count, default=1)
    add(
        *("--batch-size", "--batch_size_per_gpu"),
        type=count,
        default=16,
        help="rows per process and micro-batch",
    )
    add(
        *("--accumulation", "--gradient_accumulation_steps"),
        type=count,
        default=1,
        help="micro-batches per step",
    )
    add(
        *("--buffer-rows", "--dataloader_buffer_size"),
        type=count,
        default=5000,
        help="rows shuffled at a time",
    )
    add("--host-memory", type=float, metavar="GIB", help="limit (default: detected)")
    add(
        *("--seq-len", "--max_seq_len"),
        type=count,
        default=128,
        help="bytes per row; longer rows are truncated",
    )
    add("--layers", type=count, default=2)
    add("--heads", type=count, default=4)
    add("--width", type=count, default=64)
    add("--lr", "--learn_rate", type=float, default=3e-3)
    add("--warmup", "--warmup_steps", type=count, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--log-every", "--logging_steps", type=count, default=100, metavar="STEPS")
    add(
        "--clear-every", type=count, default=50, metavar="STEPS", help="how often to release caches"
    )
    add(
        "--memory-every", type=count, default=200, metavar="STEPS", help="how often to print memory"
    )
    add(
        *("--save-every", "--save_steps"),
        type=count,
        default=5000,
        metavar="STEPS",
        help="steps between checkpoints; also saved after each epoch",
    )
    add("--keep", type=count, default=1, metavar="N", help="number of newest checkpoints to keep")
    add(
        *("--keep-best", "--keep_latest_n_ckp"),
        type=count,
        default=5,
        metavar="N",
        help="number of weights to keep, by held-out loss",
    )
    add(
        "--override",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint: {', '.join(OVERRIDABLE)}",
    )
    add("--held-out", type=count, default=256, metavar="ROWS", help="rows for the held-out loss")
    add("--bleu-rows", type=count, default=32, metavar="ROWS", help="rows for BLEU")
    if parser.parse_args(argv).large:
        parser.set_defaults(**LARGE)
    if planned := runtime.planned():  # by `clusterrun submit --plan`
        parser.set_defaults(batch_size=planned.micro_batch, accumulation=planned.accumulation)
    args = parser.parse_args(argv)
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that are invalid, alone or together."""
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is not a learning rate")
    if args.host_memory is not None and not 0 < args.host_memory < math.inf:
        parser.error(f"--host-memory {args.host_memory} is not a size")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")


def truth(text: str) -> bool:
    """Parse True or False, for argparse."""
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text == "True"


# `--large`, or `--use_large_config=True`
SWITCH: dict[str, Any] = {"type": truth, "nargs": "?", "const": True, "default": False}


def count(text: str) -> int:
    """Parse a count of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def folder(text: str) -> Path:
    """Create a directory if needed, for argparse: fail now, not at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


if __name__ == "__main__":
    try:
        run(parse_arguments())
    except DataError as error:  # a loader's worker prints its stack first
        reason = str(error).splitlines()[-1].removeprefix(f"{DataError.__module__}.DataError: ")
        raise SystemExit(f"error: {reason}") from None
