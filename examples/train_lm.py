"""Train a small byte-level GPT on real text, with accelerate and nothing else.

The same file runs in one process, under DDP, FSDP and DeepSpeed ZeRO, on CPUs and GPUs: how many
processes there are, their precision and their strategy come from `accelerate launch`, not from it.

A step is an optimizer step everywhere. One step takes ``batch size x accumulation x processes``
windows of text, so more processes mean more text per step, not more steps: `--max-steps`,
`--warmup` and the cosine count the same in every world.

Window number g of a run is decided by the seed and by g alone. At micro-batch m, process r of W
reads `batch` windows from number ``(m * W + r) * batch`` on, so a resumed run goes on with the next
window, whatever W was before. A resume that could not mean the same as a run that was never
interrupted is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DummyOptim,
    DummyScheduler,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from tiny_gpt import GPT, GPTConfig, Windows, read_corpus, split_windows
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from whole_checkpoints import STATE, newest_checkpoint, refusal, save_checkpoint

try:
    from clusterrun import runtime  # reports progress to `clusterrun status`; not needed to train
except ImportError:
    runtime = None  # type: ignore[assignment]  # the script trains the same without it


def loader(windows: Windows, batch_size: int, indices: range) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the windows of these indices in order; accelerate deals the batches to the ranks."""
    # The loader draws a seed for its workers when it starts. With a generator of its own it leaves
    # torch's alone, whose state a resumed run must find as it was saved.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(windows, batch_size=batch_size, sampler=indices, generator=generator)


def schedule_factor(step: int, *, warmup: int, max_steps: int) -> float:
    """Return the share of the peak learning rate for optimizer step `step` (from 0).

    It rises in a line over `warmup` steps, then falls in a cosine to a tenth at `max_steps`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def optimizer_and_schedule(
    accelerator: Accelerator, model: GPT, args: argparse.Namespace
) -> tuple[Any, Any]:
    """Return AdamW and the cosine, or stand-ins where a DeepSpeed config brings its own."""
    config = accelerator.deepspeed_plugin.deepspeed_config if is_deepspeed(accelerator) else {}

    def cosine(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(
            optimizer,
            lambda step: schedule_factor(step, warmup=args.warmup, max_steps=args.max_steps),
        )

    optimizer: Any
    if "optimizer" in config:
        optimizer = DummyOptim(list(model.parameters()), lr=args.lr, weight_decay=args.weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, weight_decay=args.weight_decay, betas=(0.9, 0.95)
        )
    if "scheduler" in config:
        # accelerate divides the total by the number of processes (it thinks of a loader's batches);
        # DeepSpeed counts optimizer steps: hand over what gives max_steps again.
        total = args.max_steps * accelerator.num_processes
        return optimizer, DummyScheduler(
            optimizer, total_num_steps=total, warmup_num_steps=args.warmup
        )
    if "optimizer" in config:
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=cosine)
    return optimizer, cosine(optimizer)


def checkpoint_format(accelerator: Accelerator) -> str:
    """Return what lies in a checkpoint: `whole` files, or shards of one strategy."""
    if is_deepspeed(accelerator):
        return f"deepspeed zero-{accelerator.deepspeed_plugin.zero_stage}"
    return "fsdp" if accelerator.distributed_type == DistributedType.FSDP else "whole"


def pick_checkpoint(
    accelerator: Accelerator, args: argparse.Namespace, state: dict[str, Any]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint to resume from, the same on every rank, and the state to start with."""
    chosen: list[Any] = [None, []]
    if args.output and accelerator.is_main_process:
        chosen = list(newest_checkpoint(args.output))
    path, notes = broadcast_object_list(chosen)
    if path and not args.resume:
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to go on from the newest, or another --output"
        )
    for note in notes if accelerator.is_main_process else []:
        say(note)
    if path is None:
        return None, state
    if not (path / STATE).is_file():
        raise SystemExit(f"error: {path} is on rank 0 and not on rank {accelerator.process_index}")
    saved: dict[str, Any] = json.loads((path / STATE).read_text())
    reason = refusal(saved, state, exact=args.exact)
    if reason:
        raise SystemExit(
            f"error: can't resume from {path}: {reason}\n"
            "  hint: use the settings it was made with, or another --output"
        )
    return path, {**state, "step": saved["step"], "untrained": saved["untrained"]}


def say(line: str) -> None:
    """Print one line in one piece, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def is_deepspeed(accelerator: Accelerator) -> bool:
    """Tell whether DeepSpeed runs the steps."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def make_deterministic() -> None:
    """Make torch compute the same bits each time, at the price of speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for switch in ("flash", "mem_efficient", "cudnn"):  # leave the plain attention alone
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)


def start_accelerator(args: argparse.Namespace) -> Accelerator:
    """Join the world; how large it is and its precision come from the environment."""
    handlers = []
    if args.exact:
        make_deterministic()
        # DDP regroups its gradient buckets after the first step, so a resumed run would sum in
        # another order than the run it continues. With this switch it doesn't regroup.
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        # accelerate would step the schedule once per process; we step it once per optimizer step
        step_scheduler_with_optimizer=False,
        kwargs_handlers=handlers,
    )
    if is_deepspeed(accelerator):
        follow_deepspeed(accelerator, args)
    args.accumulation = accelerator.gradient_accumulation_steps
    return accelerator


def follow_deepspeed(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Take the batch numbers from a DeepSpeed config that fixes them; fill in "auto" clipping."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    accumulation = config.get("gradient_accumulation_steps")
    if isinstance(accumulation, int):
        accelerator.gradient_accumulation_steps = accumulation
    batch_size = config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch_size, int):
        args.batch_size = batch_size
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = args.clip


def announce(accelerator: Accelerator) -> None:
    """Print where each rank is, and from rank 0 how large the world is."""
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    rank, world = accelerator.process_index, accelerator.num_processes
    say(
        f"rank {rank}/{world} on {host} local_rank {accelerator.local_process_index} "
        f"device {accelerator.device.type}"
    )
    hosts = len(set(gather_object([host])))
    if accelerator.is_main_process:
        say(f"world {world} ranks on {hosts} host{'s' if hosts != 1 else ''}")


def held_out_loss(accelerator: Accelerator, model: nn.Module, windows: Any) -> float:
    """Return the mean loss over all held-out windows, each counted once, in nats per byte."""
    model.eval()
    parts = []
    with torch.no_grad():
        for inputs, targets in windows:
            # the last batch repeats windows so that all ranks have one; this drops the repeats
            parts.append(accelerator.gather_for_metrics(model(inputs, targets)).cpu())
    model.train()
    return float(torch.cat(parts).double().mean())


@dataclass(kw_only=True)
class Meter:
    """Add up losses and time between two log lines."""

    accelerator: Accelerator
    tokens_per_step: int
    losses: list[Tensor]
    steps: int = 0
    started: float = 0.0

    def reset(self) -> None:
        """Forget what was added, and start the clock."""
        self.losses, self.steps, self.started = [], 0, time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return the mean loss over steps and ranks, and tokens a second of the whole world."""
        mean = self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean")
        elapsed = time.perf_counter() - self.started
        return float(mean), self.steps * self.tokens_per_step / elapsed


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold what the steps need."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    scheduler: Any
    meter: Meter

    def micro_batch(self, inputs: Tensor, targets: Tensor) -> None:
        """Learn from one batch; weights change when it completes a step."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = self.model(inputs, targets).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.meter.losses.append(loss.detach())

    def steps(self, batches: Any, first: int) -> Iterator[tuple[int, float]]:
        """Yield each completed step with the learning rate it used."""
        step = first
        lr = self.optimizer.param_groups[0]["lr"]
        for inputs, targets in batches:
            self.micro_batch(inputs, targets)
            if self.accelerator.sync_gradients:
                step += 1
                self.meter.steps += 1
                yield step, lr
                lr = self.optimizer.param_groups[0]["lr"]

    def log(self, step: int, lr: float) -> None:
        """Print and report loss and throughput; stop a run whose loss is no number."""
        loss, speed = self.meter.read()
        if self.accelerator.is_main_process:
            say(f"step {step}/{self.args.max_steps} loss {loss:.3f} lr {lr:.1e} tok/s {speed:.0f}")
        if runtime is not None:
            runtime.step(step, self.args.max_steps, loss=loss, lr=lr, tokens_per_s=speed)
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {step}: the training has diverged")
        self.meter.reset()

    def save(self, state: dict[str, Any]) -> None:
        """Save a checkpoint and say where it lies."""
        began = time.perf_counter()
        path = save_checkpoint(self.accelerator, self.args.output, self.args.keep, state)
        self.meter.started += time.perf_counter() - began  # throughput is that of the steps
        if self.accelerator.is_main_process:
            say(f"saved {path}")
        if runtime is not None:
            runtime.checkpoint(str(path), state["step"])


def run(args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last step, and report."""
    accelerator = start_accelerator(args)
    announce(accelerator)
    set_seed(args.seed)
    corpus = read_corpus(args.data)
    try:
        train, test = split_windows(
            corpus, seq_len=args.seq_len, held_out=args.held_out, seed=args.seed
        )
    except ValueError as error:
        raise SystemExit(
            f"error: {error}\n  hint: give more --data or a smaller --seq-len"
        ) from error
    effective = args.batch_size * args.accumulation * accelerator.num_processes
    state = {
        "step": 0,
        "untrained": None,
        "world_size": accelerator.num_processes,
        "settings": settings(accelerator, args, corpus, effective),
    }
    checkpoint, state = pick_checkpoint(accelerator, args, state)
    training, batches, tests = prepare(accelerator, args, train, test, state["step"] * effective)
    if checkpoint:
        restore(accelerator, checkpoint, state["step"])
    else:
        state["untrained"] = held_out_loss(accelerator, training.model, tests)
    train_steps(training, batches, state)
    loss = held_out_loss(accelerator, training.model, tests)
    if accelerator.is_main_process:
        say(f"held-out loss {loss:.3f} (untrained {state['untrained']:.2f})")
    accelerator.end_training()  # a gloo process that skips this can abort at its very end


def settings(
    accelerator: Accelerator, args: argparse.Namespace, corpus: bytes, effective: int
) -> dict[str, Any]:
    """Return what must be equal for two runs to be the same training."""
    names = "seed seq_len layers heads width dropout lr warmup weight_decay clip max_steps held_out"
    return {name: getattr(args, name) for name in names.split()} | {
        "format": checkpoint_format(accelerator),
        "precision": accelerator.mixed_precision,
        "effective_batch": effective,
        "text_sha256": hashlib.sha256(corpus).hexdigest(),
    }


def prepare(
    accelerator: Accelerator,
    args: argparse.Namespace,
    train: Windows,
    test: Windows,
    first_window: int,
) -> tuple[Training, Any, Any]:
    """Build the model and let accelerate place it; return the training and both loaders."""
    model = GPT(
        GPTConfig(
            hidden_size=args.width,
            layers=args.layers,
            heads=args.heads,
            seq_len=args.seq_len,
            dropout=args.dropout,
        )
    )
    if accelerator.is_main_process:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        say(f"model {parameters} parameters, {len(train)} windows of {args.seq_len} bytes")
    effective = args.batch_size * args.accumulation * accelerator.num_processes
    optimizer, scheduler = optimizer_and_schedule(accelerator, model, args)
    model, optimizer, scheduler, batches, tests = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        loader(train, args.batch_size, range(first_window, args.max_steps * effective)),
        loader(test, args.batch_size, range(len(test))),
    )
    set_seed(args.seed, device_specific=True)  # from here each rank has dropout of its own
    meter = Meter(accelerator=accelerator, tokens_per_step=effective * args.seq_len, losses=[])
    training = Training(
        accelerator=accelerator,
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        meter=meter,
    )
    return training, batches, tests


def restore(accelerator: Accelerator, checkpoint: Path, step: int) -> None:
    """Load weights, optimizer, schedule and random numbers."""
    accelerator.load_state(str(checkpoint))
    # accelerate counts micro-batches to know when a step is complete. A checkpoint lies between
    # steps, and the count of a world with another accumulation would cut steps in their middle.
    accelerator.step = 0
    if accelerator.is_main_process:
        say(f"resumed from {checkpoint} at step {step}")


def train_steps(training: Training, batches: Any, state: dict[str, Any]) -> None:
    """Take the steps that are left, with log lines and checkpoints on the way."""
    args = training.args
    training.meter.reset()
    for step, lr in training.steps(batches, state["step"]):
        last = step == args.max_steps
        if last or step % args.log_every == 0:
            training.log(step, lr)
        if args.output and (last or (args.save_every and step % args.save_every == 0)):
            training.save({**state, "step": step})


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    positive = _at_least(1)
    add = parser.add_argument
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help="text to learn from")
    add("--max-steps", type=positive, default=200, help="optimizer steps (default 200)")
    add("--batch-size", type=positive, default=8, help="windows per process and micro-batch")
    add("--accumulation", type=positive, default=1, help="micro-batches per step")
    add("--seq-len", type=positive, default=128, help="bytes per window")
    add("--held-out", type=positive, default=256, help="windows to test on, at most")
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=_at_least(0), default=20, help="optimizer steps of warm-up")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--output", type=Path, metavar="DIR", help="where checkpoints go (shared by all nodes)")
    add("--save-every", type=positive, metavar="STEPS", help="the last step is always saved")
    add("--keep", type=positive, default=2, metavar="N", help="checkpoints to keep")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint")
    add("--exact", action="store_true", help="a resumed run gives the same bits (none and ddp)")
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if (args.save_every or args.resume) and not args.output:
        parser.error("--save-every and --resume need --output DIR")
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
