"""Train a small Transformer to sort digits on a CPU, a small GPU or a large one.

A preset sets model, batch and loader for the device; `auto` chooses it by memory. An interrupted
run resumes from its newest checkpoint with the same result.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    runtime = None  # type: ignore[assignment]  # the training is the same, without checkpoints

OVERRIDABLE = ("lr", "max_steps", "warmup")  # for --override
EPOCH_ROWS = 1024  # rows are generated: the length of an epoch is arbitrary
INTERRUPTED = 130  # the exit status of a program ended by Ctrl-C
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
CLIP = 1.0


class Interrupt:
    """Defers Ctrl-C to the end of the step; a second one ends the script at once."""

    came = False

    def listen(self) -> None:
        """Start handling Ctrl-C."""
        signal.signal(signal.SIGINT, self._take)

    def _take(self, *_: object) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(kw_only=True)
class Speed:
    """Counts the steps between two log lines."""

    rows_per_step: int
    steps: int = 0
    started: float = field(default_factory=time.perf_counter)

    def read(self) -> float:
        """Return the rows per second over all ranks since the last reading."""
        now = time.perf_counter()
        rate = self.steps * self.rows_per_step / (now - self.started)
        self.steps, self.started = 0, now
        return rate


@dataclass(frozen=True, kw_only=True)
class Training:
    """The state that the steps need."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    store: Any  # the checkpoints; None without clusterrun
    speed: Speed
    interrupt: Interrupt
    newest: dict[str, float] = field(default_factory=dict)  # the values of the last line

    def run(self, batches: Any, first: int) -> bool:
        """Take the steps from `first` on; return False if the job asked to save and exit."""
        step, losses = first, []
        self.set_rate(step)
        for rows in batches:
            losses.append(self.learn(rows))
            if not self.accelerator.sync_gradients:
                continue
            step += 1
            self.speed.steps += 1
            if step % self.args.log_every == 0 or step == self.args.max_steps:
                self.log(step, losses)
            losses = []  # of one step only: a resumed run has none of the earlier steps
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
        """Print and track the loss of a step on rank 0, as the mean of all ranks."""
        mean = torch.stack(list(losses)).mean()
        loss = float(self.accelerator.reduce(mean, reduction="mean"))
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {step}: the training has diverged")
        rate, speed = self.optimizer.param_groups[0]["lr"], self.speed.read()
        self.newest.update(loss=loss, lr=rate, samples_per_s=speed)
        self.accelerator.log(self.newest, step=step)
        at = f"step {step}/{self.args.max_steps}"
        self.say(f"{at} loss {loss:.5f} lr {rate:.1e} samples/s {speed:.0f}")

    def is_told_to_leave(self, step: int) -> bool:
        """Report a step, save if it is due or requested, and return whether to exit."""
        asked = leave = self.interrupt.came
        last = step == self.args.max_steps
        if runtime is not None:
            runtime.step(step, self.args.max_steps, **self.newest)
            asked = runtime.should_checkpoint() or asked
            leave = runtime.should_stop() or leave
            if asked or last or step % self.args.save_every == 0:
                self.save(step)
        if leave and not last:
            self.say(f"stopped at step {step}")
        return leave and not last

    def save(self, step: int) -> None:
        """Save a checkpoint and print its path."""
        began = time.perf_counter()
        path = self.store.save(step, lambda folder: self.accelerator.save_state(str(folder)))
        self.speed.started += time.perf_counter() - began  # the speed counts only the steps
        self.say(f"saved {path}" if path else f"step {step} was not saved")

    def held_out(self, batches: Any) -> float:
        """Return the share of held-out rows that are sorted correctly."""
        self.model.eval()
        with torch.no_grad():
            # the last batch repeats rows to give each rank one; this drops the repeats
            parts = [
                self.accelerator.gather_for_metrics(is_right(self.model(rows), rows))
                for rows in batches
            ]
        self.model.train()
        return float(torch.cat(parts).float().mean())

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.accelerator.is_main_process:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def rate_factor(step: int, warmup: int, max_steps: int) -> float:
    """Return the fraction of the peak rate for a step (from 0): linear up, cosine down."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def precision(args: argparse.Namespace) -> str | None:
    """Return the precision for accelerate; None if the launcher has chosen it.

    Use bf16 from compute capability 8.0 on: older GPUs emulate it, though torch reports support.
    """
    if args.no_mixed_precision or "cpu" in (args.preset, args.device):
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
    """Join the world, and choose one preset for all ranks."""
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        mixed_precision=precision(args),
        log_with=tracking.names(args) or None,  # accelerate warns about an empty list
        project_dir=args.tensorboard,
    )
    if accelerator.distributed_type not in PLAIN:
        raise SystemExit(
            "error: this example is for one process and DDP\n"
            "  hint: use --strategy ddp, or ../train_lm.py for FSDP and DeepSpeed"
        )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but accelerate did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    # fp16 scales its gradients and bf16 does not: their sums would be wrong
    precisions = sorted(set(gather_object([accelerator.mixed_precision])))
    if len(precisions) > 1:
        raise SystemExit(
            f"error: the ranks compute in {' and '.join(precisions)}\n"
            "  hint: choose one for all ranks with the launcher's --mixed-precision"
        )
    if args.preset == "auto":
        # the smallest GPU decides: the model must fit on all of them
        args.preset = preset_for(min(gather_object([memory_bytes(accelerator.device)])))
    preset = chosen(args)
    if preset.width % preset.heads:
        raise SystemExit(
            f"error: --hidden-dim {preset.width} is not a multiple of {preset.heads} heads"
        )
    accelerator.gradient_accumulation_steps = preset.accumulation
    if args.max_epochs:
        batch = effective_batch(accelerator, preset)
        args.max_steps = math.ceil(args.max_epochs * EPOCH_ROWS / batch)
    return accelerator


def chosen(args: argparse.Namespace) -> Preset:
    """Return the preset, overridden by the plan, and both overridden by the flags.

    If only the batch size is given, the accumulation is adapted so that a step keeps its rows.
    """
    preset, plan = PRESETS[args.preset], runtime.planned() if runtime is not None else None
    if plan is not None:
        preset = replace(
            preset,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            grad_ckpt=plan.gradient_checkpointing,
        )
    batch = args.batch_size or preset.micro_batch
    passes = max(1, preset.micro_batch * preset.accumulation // batch)
    spared = args.gradient_checkpointing
    return replace(
        preset,
        width=args.hidden_dim or preset.width,
        layers=args.n_layers or preset.layers,
        micro_batch=batch,
        accumulation=args.accumulation or passes,
        grad_ckpt=preset.grad_ckpt if spared is None else spared,
    )


def settings(accelerator: Accelerator, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that two runs of the same training must share."""
    preset, names = chosen(args), ("length", "max_steps", "lr", "warmup", "seed")
    return {name: getattr(args, name) for name in names} | {
        "width": preset.width,
        "layers": preset.layers,
        "heads": preset.heads,
        "precision": accelerator.mixed_precision,
        "effective_batch": effective_batch(accelerator, preset),
    }


def effective_batch(accelerator: Accelerator, preset: Preset) -> int:
    """Return the rows of one optimizer step over all ranks."""
    return int(preset.micro_batch * preset.accumulation * accelerator.num_processes)


def checkpoint_to_resume(store: Any, args: argparse.Namespace) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start anew.

    Any number of ranks may resume from it with the same rows per step.
    """
    if not args.resume:
        if store.newest() is None:
            return None
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to continue from the newest, or choose another --output"
        )
    found = store.resumable(overridable=OVERRIDABLE)
    if isinstance(args.resume, Path) and (found is None or found.path != args.resume.absolute()):
        raise SystemExit(
            f"error: {args.resume} is not the newest complete checkpoint there\n"
            "  hint: pass --resume without a path, or move the newer ones away to go back"
        )
    return found


def loader(args: argparse.Namespace, numbers: range) -> DataLoader[Tensor]:
    """Return rows in order; accelerate deals the batches to the ranks."""
    preset = chosen(args)
    # The loader draws a seed for its workers when it starts. A separate generator leaves
    # torch's state unchanged, as a resumed run must find it.
    return DataLoader(
        Rows(numbers, length=args.length, seed=args.seed),
        batch_size=preset.micro_batch,
        num_workers=min(preset.num_workers, cpus_of_this_rank()),
        pin_memory=preset.pin_memory and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
    )


def cpus_of_this_rank() -> int:
    """Return this rank's share of the CPUs that the ranks of its node may use."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def train(accelerator: Accelerator, args: argparse.Namespace, interrupt: Interrupt) -> bool:
    """Train from the start or the newest checkpoint; return False if it had to stop early."""
    set_seed(args.seed)
    preset, now = chosen(args), settings(accelerator, args)
    store = checkpoint = None
    if runtime is not None:
        store = runtime.Checkpoints(args.output, settings=now, override=args.override)
        checkpoint = checkpoint_to_resume(store, args)
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
        accelerator=accelerator,
        args=args,
        model=model,
        optimizer=optimizer,
        store=store,
        speed=Speed(rows_per_step=batch),
        interrupt=interrupt,
    )
    training.say(
        f"preset {args.preset}: {parameters} parameters, {batch} rows a step on "
        f"{accelerator.num_processes} rank(s), precision {accelerator.mixed_precision}, "
        f"{accelerator.device.type}"
    )
    if checkpoint:
        accelerator.load_state(str(checkpoint.path))
        # accelerate counts passes. A checkpoint is between steps; with another accumulation the
        # saved count would end steps too early or late.
        accelerator.step = 0
        training.say(f"resumed from {checkpoint.path} at step {first}")
    run = runtime.info() if runtime is not None else None
    tracking.start(accelerator, now, run.run_dir.name if run else None)
    if not training.run(batches, first):
        return False
    sorted_share = training.held_out(tests)
    accelerator.log({"sorted": sorted_share}, step=args.max_steps)
    training.say(f"held-out rows sorted {sorted_share:.3f}")
    return True


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed."""
    interrupt = Interrupt()
    accelerator = start_accelerator(args)
    # Several ranks would see Ctrl-C at different steps: they save by the run's save point.
    if accelerator.num_processes == 1 and (runtime is None or runtime.info() is None):
        interrupt.listen()
    is_done = train(accelerator, args, interrupt)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()  # also closes the trackers
    if interrupt.came and not is_done:
        how = "without clusterrun nothing is saved"
        if runtime is not None:
            how = "continue from there with the same command and --resume"
        sys.stderr.write(f"interrupted: {how}\n")
        raise SystemExit(INTERRUPTED)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--preset", choices=["auto", *PRESETS], default="auto", help="auto chooses by memory")
    add("--device", choices=["auto", "cpu"], default="auto", help="device; cpu ignores a GPU")
    add("--batch-size", type=count, metavar="ROWS", help="rows per rank and pass")
    add("--accumulation", "--gradient-accumulation", type=count, metavar="PASSES", help="per step")
    add("--hidden-dim", type=count, metavar="WIDTH", help="of the model (default: the preset's)")
    add("--n-layers", type=count, metavar="N", help="layers of the model (default: the preset's)")
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="use less memory and a third more compute (default: no)",
    )
    add("--no-mixed-precision", action="store_true", help="compute in fp32")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--max-steps", type=count, default=400, help="optimizer steps (default 400)"
    )
    length.add_argument("--max-epochs", type=count, help=f"epochs of {EPOCH_ROWS} rows instead")
    add("--length", type=count, default=10, help="digits per row (default 10)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    add("--warmup", type=count, default=40, help="optimizer steps of warm-up (default 40)")
    add("--seed", type=int, default=0)
    add("--log-every", type=count, default=20, metavar="STEPS")
    add(
        *("--wandb", "--use-wandb"),
        action="store_true",
        help="track with Weights & Biases, with the key in WANDB_API_KEY",
    )
    add("--tensorboard", type=folder, metavar="DIR", help="write TensorBoard files")
    add("--output", type=folder, metavar="DIR", help="checkpoints (default: the run's, else 'out')")
    add("--save-every", type=count, default=100, metavar="STEPS")
    add(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="resume from the newest checkpoint (always in a run); a path must name that one",
    )
    add(
        "--override",
        type=lambda text: text.replace("-", "_").split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint: {', '.join(OVERRIDABLE)}",
    )
    args = parser.parse_args(argv)
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is not a learning rate")
    if runtime is None and (args.output or args.resume):
        parser.error("checkpoints need clusterrun: pip install clusterrun")
    own = runtime.checkpoint_dir() if runtime is not None else None
    named = args.resume.parent if isinstance(args.resume, Path) else None
    args.output = args.output or named or own or Path("out")
    # The run's directory holds only what its earlier attempts have saved.
    attempt = runtime.info() if runtime is not None else None
    if attempt and args.tensorboard:
        args.tensorboard /= attempt.run_dir.name  # keep the curves of runs apart
    # Only the first attempt resumes from a named checkpoint.
    is_later = attempt is not None and attempt.attempt > 1
    args.resume = is_later or args.resume or args.output == own
    if args.override and not args.resume:
        parser.error("--override needs --resume")
    return args


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
    run(parse_arguments())
