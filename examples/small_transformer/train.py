"""Train a small Transformer to sort digits, on whatever is there: a CPU, a small or a large GPU.

A preset sizes model, batch and loader for the device; `auto` looks at its memory. A run that was
cut goes on from its newest checkpoint as if it had not been.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tracking
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from presets import PRESETS, Preset, preset_for
from sorting import HELD_OUT, Rows, Sorter, is_right, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    from clusterrun import runtime  # checkpoints, and progress for `clusterrun status`
except ImportError:
    runtime = None  # type: ignore[assignment]  # it trains the same, without checkpoints

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold what the steps need."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    store: Any  # of checkpoints; None where none are wanted

    def run(self, batches: Any, first: int) -> bool:
        """Take the steps from `first` on; False where the job asked to save and leave."""
        step, losses = first, []
        self.set_rate(step)
        for rows in batches:
            losses.append(self.learn(rows))
            if not self.accelerator.sync_gradients:
                continue
            step += 1
            if step % self.args.log_every == 0 or step == self.args.max_steps:
                self.log(step, losses)
            losses = []  # those of a step: a run that was cut has none of the steps before
            if self.is_told_to_leave(step):
                return False
            self.set_rate(step)
        return True

    def learn(self, rows: Tensor) -> Tensor:
        """Learn from one batch and return its loss; weights change when it completes a step."""
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model(rows), rows)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def set_rate(self, step: int) -> None:
        """Set the learning rate of the step after `step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * rate_factor(step, self.args.warmup, self.args.max_steps)

    def log(self, step: int, losses: Sequence[Tensor]) -> None:
        """Print and track the loss of a step, the mean of all ranks; rank 0 alone does."""
        mean = torch.stack(list(losses)).mean()
        loss = float(self.accelerator.reduce(mean, reduction="mean"))
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {step}: the training has diverged")
        rate = self.optimizer.param_groups[0]["lr"]
        self.accelerator.log({"loss": loss, "lr": rate}, step=step)
        self.say(f"step {step}/{self.args.max_steps} loss {loss:.5f} lr {rate:.1e}")

    def is_told_to_leave(self, step: int) -> bool:
        """Report a step, save where it is time to or the job asks, and say whether to leave."""
        if runtime is None:
            return False
        runtime.step(step, self.args.max_steps)
        asked, last = runtime.should_checkpoint(), step == self.args.max_steps
        if self.store and (asked or last or step % self.args.save_every == 0):
            path = self.store.save(step, lambda folder: self.accelerator.save_state(str(folder)))
            self.say(f"saved {path}" if path else f"step {step} was not saved")
        if last or not runtime.should_stop():
            return False
        self.say(f"stopped at step {step}")
        return True

    def held_out(self, batches: Any) -> float:
        """Return the share of held-out rows that are sorted without a mistake."""
        self.model.eval()
        with torch.no_grad():
            # the last batch repeats rows so that all ranks have one; this drops the repeats
            parts = [
                self.accelerator.gather_for_metrics(is_right(self.model(rows), rows))
                for rows in batches
            ]
        self.model.train()
        return float(torch.cat(parts).float().mean())

    def say(self, line: str) -> None:
        """Print a line, on rank 0."""
        if self.accelerator.is_main_process:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def rate_factor(step: int, warmup: int, max_steps: int) -> float:
    """Return the share of the peak rate for a step (from 0): up in a line, down in a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def precision(args: argparse.Namespace) -> str | None:
    """Return what accelerate is to compute in; None leaves it to the launcher, which has chosen.

    bf16 from compute capability 8.0 on: older cards emulate it, though torch calls it supported.
    """
    if args.no_mixed_precision or args.preset == "cpu":
        return "no"
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if "ACCELERATE_MIXED_PRECISION" in os.environ or on_cpu or not torch.cuda.is_available():
        return None
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def start_accelerator(args: argparse.Namespace) -> Accelerator:
    """Join the world, and settle on one preset for all its ranks."""
    accelerator = Accelerator(
        mixed_precision=precision(args),
        log_with=tracking.names(args) or None,  # of an empty list accelerate warns
        project_dir=args.tensorboard,
    )
    if accelerator.distributed_type not in PLAIN:
        raise SystemExit(
            "error: this example is for one process and DDP\n"
            "  hint: --strategy ddp; ../train_lm.py has FSDP and DeepSpeed, too"
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher has started {started} ranks, and accelerate did not join them\n"
            "  hint: without GPUs it needs ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would train in fp32, and not say so")
    # fp16 scales its gradients and bf16 does not: ranks of both kinds would add up nonsense
    precisions = sorted(set(gather_object([accelerator.mixed_precision])))
    if len(precisions) > 1:
        raise SystemExit(
            f"error: the ranks compute in {' and '.join(precisions)}\n"
            "  hint: choose one for all: --mixed-precision of the launcher"
        )
    if args.preset == "auto":
        # of unlike GPUs the smallest decides: one model must fit them all
        args.preset = preset_for(min(gather_object([memory_bytes(accelerator.device)])))
    accelerator.gradient_accumulation_steps = chosen(args).accumulation
    return accelerator


def chosen(args: argparse.Namespace) -> Preset:
    """Return the preset; what `clusterrun submit --plan` has planned goes before its batches."""
    preset, plan = PRESETS[args.preset], runtime.planned() if runtime is not None else None
    if plan is None:
        return preset
    return replace(
        preset,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        grad_ckpt=plan.gradient_checkpointing,
    )


def settings(accelerator: Accelerator, args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be equal for two runs to be the same training."""
    names = ("preset", "length", "max_steps", "lr", "warmup", "seed")
    return {name: getattr(args, name) for name in names} | {
        "precision": accelerator.mixed_precision,
        "effective_batch": effective_batch(accelerator, chosen(args)),
    }


def effective_batch(accelerator: Accelerator, preset: Preset) -> int:
    """Return the rows of one optimizer step in the whole world."""
    return int(preset.micro_batch * preset.accumulation * accelerator.num_processes)


def checkpoint_to_resume(
    store: Any, accelerator: Accelerator, args: argparse.Namespace, now: Mapping[str, Any]
) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start afresh."""
    newest = store.newest() if store else None
    if newest is None:
        return None
    if not args.resume:
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to go on from the newest, or another --output"
        )
    if reason := newest.difference(accelerator.num_processes, now):
        raise SystemExit(
            f"error: can't go on from {newest.path}: {reason}\n"
            "  hint: use its settings (--preset NAME rather than auto), or another --output"
        )
    return newest


def loader(args: argparse.Namespace, numbers: range) -> DataLoader[Tensor]:
    """Return rows in order; accelerate deals the batches to the ranks."""
    preset = chosen(args)
    # The loader draws a seed for its workers when it starts. With a generator of its own it leaves
    # torch's alone, whose state a resumed run must find as it was saved.
    return DataLoader(
        Rows(numbers, length=args.length, seed=args.seed),
        batch_size=preset.micro_batch,
        num_workers=min(preset.num_workers, len(os.sched_getaffinity(0))),
        pin_memory=preset.pin_memory and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
    )


def train(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last step, and report."""
    set_seed(args.seed)
    preset, now = chosen(args), settings(accelerator, args)
    store = runtime.Checkpoints(args.output, settings=now) if args.output else None
    checkpoint = checkpoint_to_resume(store, accelerator, args, now)
    first = checkpoint.step if checkpoint else 0
    model = Sorter(
        length=args.length,
        width=preset.width,
        layers=preset.layers,
        heads=preset.heads,
        grad_ckpt=preset.grad_ckpt,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = effective_batch(accelerator, preset)
    model, optimizer, batches, tests = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        loader(args, range(first * batch, args.max_steps * batch)),
        loader(args, HELD_OUT),
    )
    training = Training(
        accelerator=accelerator, args=args, model=model, optimizer=optimizer, store=store
    )
    training.say(
        f"preset {args.preset}: {parameters} parameters, {batch} rows a step on "
        f"{accelerator.num_processes} rank(s), precision {accelerator.mixed_precision}, "
        f"{accelerator.device.type}"
    )
    if checkpoint:
        accelerator.load_state(str(checkpoint.path))
        training.say(f"resumed from {checkpoint.path} at step {first}")
    run = runtime.info() if runtime is not None else None
    tracking.start(accelerator, now, run.run_dir.name if run else None)
    if training.run(batches, first):
        sorted_share = training.held_out(tests)
        accelerator.log({"sorted": sorted_share}, step=args.max_steps)
        training.say(f"held-out rows sorted {sorted_share:.3f}")


def run(args: argparse.Namespace) -> None:
    """Train, and leave the group of ranks when nothing of the training is left."""
    accelerator = start_accelerator(args)
    train(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()  # closes the trackers, too


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--preset", choices=["auto", *PRESETS], default="auto", help="auto: by the device's memory")
    add("--no-mixed-precision", action="store_true", help="compute in fp32")
    add("--max-steps", type=count, default=400, help="optimizer steps (default 400)")
    add("--length", type=count, default=10, help="digits of a row (default 10)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    add("--warmup", type=count, default=40, help="optimizer steps of warm-up (default 40)")
    add("--seed", type=int, default=0)
    add("--log-every", type=count, default=20, metavar="STEPS")
    add("--wandb", action="store_true", help="track with Weights & Biases; its key: WANDB_API_KEY")
    add("--tensorboard", type=folder, metavar="DIR", help="write TensorBoard's files there")
    add("--output", type=folder, metavar="DIR", help="where checkpoints go (in a run: its own)")
    add("--save-every", type=count, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="go on from the newest checkpoint (in a run: always)")
    args = parser.parse_args(argv)
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is no learning rate")
    own = runtime.checkpoint_dir() if runtime is not None else None
    args.output = args.output or own
    if args.resume and not args.output:
        parser.error("--resume needs --output DIR")
    if args.output and runtime is None:
        parser.error("checkpoints need clusterrun: pip install clusterrun")
    # The run's own directory holds nothing but what its earlier attempts have saved.
    attempt = runtime.info() if runtime is not None else None
    if attempt and args.tensorboard:
        args.tensorboard /= attempt.run_dir.name  # curves of other runs would be drawn into its own
    args.resume = args.resume or (
        attempt is not None and (attempt.attempt > 1 or args.output == own)
    )
    return args


def count(text: str) -> int:
    """Read a count of one or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def folder(text: str) -> Path:
    """Make a directory unless it is there, for argparse: better now than at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


if __name__ == "__main__":
    run(parse_arguments())
