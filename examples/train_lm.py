"""Train a small byte-level GPT on real text, with accelerate and nothing else.

The same file runs in one process, under DDP, FSDP and DeepSpeed ZeRO, on CPUs and GPUs: the number
of processes, their precision and their strategy come from `accelerate launch`.

A step is an optimizer step everywhere. One step takes ``batch size x accumulation x processes``
windows of text, so more processes mean more text per step, not more steps: `--max-steps`,
`--warmup` and the cosine count the same in every world.

Window number g of a run depends only on the seed and g. At micro-batch m, process r of W reads
`batch` windows starting at number ``(m * W + r) * batch``, so a resumed run continues with the next
window, whatever W was before. A resume is refused if it could not match an uninterrupted run.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from resume import OVERRIDABLE, checkpoint_to_resume, effective_batch, load, settings, write
from strategies import checkpoint_format, optimizer_and_schedule, start_accelerator
from tiny_gpt import GPT, GPTConfig, Windows, read_corpus, split_windows
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    from clusterrun import runtime  # checkpoints, and progress for `clusterrun status`
except ImportError:
    runtime = None  # type: ignore[assignment]  # the training is the same, without checkpoints


def loader(windows: Windows, batch_size: int, indices: range) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the windows of these indices in order; accelerate deals the batches to the ranks."""
    # The loader draws a seed for its workers when it starts. A separate generator leaves
    # torch's state unchanged, as a resumed run must find it.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(windows, batch_size=batch_size, sampler=indices, generator=generator)


def schedule_factor(step: int, *, warmup: int, max_steps: int) -> float:
    """Return the fraction of the peak learning rate for optimizer step `step` (from 0).

    It rises linearly over `warmup` steps, then falls as a cosine to a tenth at `max_steps`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def say(line: str) -> None:
    """Print a line with a single write, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def announce(accelerator: Accelerator, *, exact: bool) -> None:
    """Print where each rank is, and on rank 0 the world size."""
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    rank, world = accelerator.process_index, accelerator.num_processes
    say(
        f"rank {rank}/{world} on {host} local_rank {accelerator.local_process_index} "
        f"device {accelerator.device.type}"
    )
    hosts = len(set(gather_object([host])))
    if accelerator.is_main_process:
        say(f"world {world} ranks on {hosts} host{'s' if hosts != 1 else ''}")
        if exact and checkpoint_format(accelerator) != "whole":
            say("note: --exact is for one process and DDP; sharded optimizers may differ slightly")


def held_out_loss(accelerator: Accelerator, model: nn.Module, windows: Any) -> float:
    """Return the mean loss over all held-out windows, each counted once, in nats per byte."""
    model.eval()
    parts = []
    with torch.no_grad():
        for inputs, targets in windows:
            # the last batch repeats windows to give each rank one; this drops the repeats
            parts.append(accelerator.gather_for_metrics(model(inputs, targets)).cpu())
    model.train()
    return float(torch.cat(parts).double().mean())


@dataclass(kw_only=True)
class Meter:
    """Sum losses and time between two log lines."""

    accelerator: Accelerator
    tokens_per_step: int
    losses: list[Tensor] = field(default_factory=list)
    steps: int = 0
    started: float = 0.0
    newest: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Clear the sums, and start the clock."""
        self.losses, self.steps, self.started = [], 0, time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return the mean loss over steps and ranks, and tokens per second over all ranks."""
        mean = self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean")
        elapsed = time.perf_counter() - self.started
        return float(mean), self.steps * self.tokens_per_step / elapsed


@dataclass(frozen=True, kw_only=True)
class Training:
    """The state that the steps need."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    own_schedule: bool
    meter: Meter
    store: Any  # the checkpoints; None without them

    def micro_batch(self, inputs: Tensor, targets: Tensor) -> None:
        """Learn from one batch; weights change when it completes a step."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = self.model(inputs, targets).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.meter.losses.append(loss.detach())

    def steps(self, batches: Any, first: int) -> Iterator[tuple[int, float]]:
        """Yield each completed step with the learning rate it used."""
        step = first
        lr = self.set_rate(step)
        for inputs, targets in batches:
            self.micro_batch(inputs, targets)
            if self.accelerator.sync_gradients:
                step += 1
                self.meter.steps += 1
                yield step, lr
                lr = self.set_rate(step)

    def set_rate(self, step: int) -> float:
        """Set the learning rate of the step after `step`; return the optimizer's value."""
        if self.own_schedule:
            lr = self.args.lr * schedule_factor(
                step, warmup=self.args.warmup, max_steps=self.args.max_steps
            )
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        return float(self.optimizer.param_groups[0]["lr"])

    def log(self, step: int, lr: float) -> None:
        """Print and report loss and throughput; stop a run whose loss is not finite."""
        loss, speed = self.meter.read()
        if self.accelerator.is_main_process:
            say(f"step {step}/{self.args.max_steps} loss {loss:.3f} lr {lr:.1e} tok/s {speed:.0f}")
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {step}: the training has diverged")
        self.meter.reset()
        self.meter.newest = {"loss": loss, "tokens_per_s": speed}

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Save a checkpoint and print its path; return whether it was saved."""
        began = time.perf_counter()
        path = self.store.save(step, lambda folder: write(folder, self.accelerator, state))
        self.meter.started += time.perf_counter() - began  # throughput counts only the steps
        if path and self.accelerator.is_main_process:
            say(f"saved {path}")
        return path is not None


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed.

    A gloo process that exits without destroying its group can abort at exit after a good run; one
    whose model is freed after the group can hang there (torch 2.13).
    """
    accelerator = start_accelerator(args)
    train_and_report(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_and_report(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last step, and report."""
    announce(accelerator, exact=args.exact)
    set_seed(args.seed)
    try:
        corpus = read_corpus(args.data)
        train, test = split_windows(
            corpus, seq_len=args.seq_len, held_out=args.held_out, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: can't use this text: {error}") from error
    now = settings(accelerator, args, corpus)
    store = checkpoint = None
    if args.output:
        store = runtime.Checkpoints(
            args.output, keep=args.keep, settings=now, override=args.override
        )
        checkpoint = checkpoint_to_resume(store, accelerator, args)
    step = checkpoint.step if checkpoint else 0
    training, batches, tests = prepare(accelerator, args, train, test, store, step)
    if checkpoint:
        state = load(checkpoint.path, accelerator)
        if accelerator.is_main_process:
            say(f"resumed from {checkpoint.path} at step {step}")
    else:
        state = {"untrained": held_out_loss(accelerator, training.model, tests)}
    if not train_steps(training, batches, step, state):
        return
    loss = held_out_loss(accelerator, training.model, tests)
    if accelerator.is_main_process:
        say(f"held-out loss {loss:.3f} (untrained {state['untrained']:.2f})")


def prepare(
    accelerator: Accelerator,
    args: argparse.Namespace,
    train: Windows,
    test: Windows,
    store: Any,
    first_step: int,
) -> tuple[Training, Any, Any]:
    """Build the model and let accelerate prepare it; return the training and both loaders."""
    model = GPT(
        GPTConfig(
            hidden_size=args.width,
            layers=args.layers,
            heads=args.heads,
            seq_len=args.seq_len,
            dropout=args.dropout,
        )
    )
    effective = effective_batch(accelerator, args)
    if accelerator.is_main_process:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        say(f"model {parameters} parameters, text {len(train)} windows of {args.seq_len} bytes")
        parts = f"{args.batch_size} x {args.accumulation} accumulation"
        say(f"batch {parts} x {accelerator.num_processes} ranks = {effective} windows a step")
    optimizer, scheduler = optimizer_and_schedule(accelerator, model, args)
    model, optimizer, _, batches, tests = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        loader(train, args.batch_size, range(first_step * effective, args.max_steps * effective)),
        loader(test, args.batch_size, range(len(test))),
    )
    set_seed(args.seed, device_specific=True)  # from here each rank has different dropout
    meter = Meter(accelerator=accelerator, tokens_per_step=effective * args.seq_len)
    training = Training(
        accelerator=accelerator,
        args=args,
        model=model,
        optimizer=optimizer,
        own_schedule=scheduler is None,
        meter=meter,
        store=store,
    )
    return training, batches, tests


def train_steps(training: Training, batches: Any, first: int, state: dict[str, Any]) -> bool:
    """Take the remaining steps; return False if the job asked to save and exit."""
    args, store = training.args, training.store
    training.meter.reset()
    for step, lr in training.steps(batches, first):
        last = step == args.max_steps
        if last or step % args.log_every == 0:
            training.log(step, lr)
        if runtime is not None:
            runtime.step(step, args.max_steps, lr=lr, **training.meter.newest)
        if store is None:
            continue
        asked = runtime.should_checkpoint()
        if asked or last or (args.save_every and step % args.save_every == 0):
            saved = training.save(step, state)
        if last and not saved:
            raise SystemExit(f"error: step {step}, the last, was not saved")
        if asked and not last and runtime.should_stop():
            if training.accelerator.is_main_process:
                say(f"stopped at step {step}, {'saved' if saved else 'not saved'}")
            return False
    return True


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    positive = _at_least(1)
    add = parser.add_argument
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help="text to learn from")
    add("--max-steps", type=positive, default=200, help="optimizer steps (default 200)")
    planned = runtime.planned() if runtime else None  # by `clusterrun submit --plan`
    batch, passes = (planned.micro_batch, planned.accumulation) if planned else (8, 1)
    add("--batch-size", type=positive, default=batch, help="windows per process and micro-batch")
    add("--accumulation", type=positive, default=passes, help="micro-batches per step")
    add("--seq-len", type=positive, default=128, help="bytes per window")
    add("--held-out", type=positive, default=256, help="at most so many windows to test on")
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=_at_least(0), default=20, help="optimizer steps of warm-up")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="maximum gradient norm")
    add("--seed", type=int, default=0)
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="checkpoint directory, shared by all nodes (default: that of the run)",
    )
    add(
        "--save-every",
        type=positive,
        metavar="STEPS",
        help="steps between checkpoints; the last is always saved",
    )
    add("--keep", type=positive, default=2, metavar="N", help="checkpoints to keep")
    add(
        "--resume",
        action="store_true",
        help="resume from the newest complete checkpoint (in a run of clusterrun: always)",
    )
    add(
        "--override",
        type=lambda text: text.replace("-", "_").split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint: {', '.join(OVERRIDABLE)}",
    )
    add("--exact", action="store_true", help="make a resumed run bitwise equal (none and ddp)")
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    own = runtime.checkpoint_dir() if runtime is not None else None
    run = runtime.info() if runtime is not None else None
    is_later = (
        run is not None and run.attempt > 1
    )  # resumes from what was saved, whatever its flags
    if (args.save_every or args.resume or is_later) and not args.output:
        args.output = own
        if own is None:
            parser.error("--save-every and --resume need --output DIR")
    if args.output and runtime is None:
        parser.error("checkpoints need clusterrun: pip install clusterrun")
    # The run's directory holds only what its earlier attempts have saved.
    args.resume = args.resume or is_later or (run is not None and args.output == own)
    if args.override and not args.resume:
        parser.error("--override needs --resume")
    return args


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


if __name__ == "__main__":
    run(parse_arguments())
