"""Train a small Transformer to sort digits, on whatever is there: a CPU, a small or a large GPU.

A preset sizes model, batch and loader for the device; `auto` looks at its memory. A run that was
cut goes on from its newest checkpoint as if it had not been.
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
    runtime = None  # type: ignore[assignment]  # it trains the same, without checkpoints

OVERRIDABLE = ("lr", "max_steps", "warmup")  # for --override
EPOCH_ROWS = 1024  # rows are made as they are needed: an epoch is as many as we say
INTERRUPTED = 130  # the status of a program that was ended by Ctrl-C
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
CLIP = 1.0


class Interrupt:
    """Ctrl-C, kept until the step is done; a second one ends the script at once."""

    came = False

    def listen(self) -> None:
        """Take Ctrl-C from now on."""
        signal.signal(signal.SIGINT, self._take)

    def _take(self, *_: object) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(kw_only=True)
class Speed:
    """Counts steps from one line to the next."""

    rows_per_step: int
    steps: int = 0
    started: float = field(default_factory=time.perf_counter)

    def read(self) -> float:
        """Return the rows a second of the whole world since the last reading."""
        now = time.perf_counter()
        rate = self.steps * self.rows_per_step / (now - self.started)
        self.steps, self.started = 0, now
        return rate


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold what the steps need."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    store: Any  # of checkpoints; None without clusterrun
    speed: Speed
    interrupt: Interrupt
    newest: dict[str, float] = field(default_factory=dict)  # what the last line said

    def run(self, batches: Any, first: int) -> bool:
        """Take the steps from `first` on; False where the job asked to save and leave."""
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
        rate, speed = self.optimizer.param_groups[0]["lr"], self.speed.read()
        self.newest.update(loss=loss, lr=rate, samples_per_s=speed)
        self.accelerator.log(self.newest, step=step)
        at = f"step {step}/{self.args.max_steps}"
        self.say(f"{at} loss {loss:.5f} lr {rate:.1e} samples/s {speed:.0f}")

    def is_told_to_leave(self, step: int) -> bool:
        """Report a step, save where it is time to or somebody asks, and say whether to leave."""
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
        """Save a checkpoint and say where it is."""
        began = time.perf_counter()
        path = self.store.save(step, lambda folder: self.accelerator.save_state(str(folder)))
        self.speed.started += time.perf_counter() - began  # the speed is that of the steps
        self.say(f"saved {path}" if path else f"step {step} was not saved")

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
    """Join the world, and settle on one preset for all its ranks."""
    accelerator = Accelerator(
        cpu=args.device == "cpu",
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
    preset = chosen(args)
    if preset.width % preset.heads:
        raise SystemExit(
            f"error: --hidden-dim {preset.width} is no multiple of {preset.heads} heads"
        )
    accelerator.gradient_accumulation_steps = preset.accumulation
    if args.max_epochs:
        batch = effective_batch(accelerator, preset)
        args.max_steps = math.ceil(args.max_epochs * EPOCH_ROWS / batch)
    return accelerator


def chosen(args: argparse.Namespace) -> Preset:
    """Return the preset with what goes before it: what was planned, and before that the flags.

    Where only the batch size is given, the passes to a step follow, so that a step keeps its rows.
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
    """Return what must be equal for two runs to be the same training."""
    preset, names = chosen(args), ("length", "max_steps", "lr", "warmup", "seed")
    return {name: getattr(args, name) for name in names} | {
        "width": preset.width,
        "layers": preset.layers,
        "heads": preset.heads,
        "precision": accelerator.mixed_precision,
        "effective_batch": effective_batch(accelerator, preset),
    }


def effective_batch(accelerator: Accelerator, preset: Preset) -> int:
    """Return the rows of one optimizer step in the whole world."""
    return int(preset.micro_batch * preset.accumulation * accelerator.num_processes)


def checkpoint_to_resume(store: Any, args: argparse.Namespace) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start afresh.

    Any number of ranks may resume from it, with the same rows to a step.
    """
    if not args.resume:
        if store.newest() is None:
            return None
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to go on from the newest, or another --output"
        )
    found = store.resumable(overridable=OVERRIDABLE)
    if isinstance(args.resume, Path) and (found is None or found.path != args.resume.absolute()):
        raise SystemExit(
            f"error: {args.resume} is not the newest complete checkpoint there\n"
            "  hint: --resume alone takes that one; to go back, move the newer ones away"
        )
    return found


def loader(args: argparse.Namespace, numbers: range) -> DataLoader[Tensor]:
    """Return rows in order; accelerate deals the batches to the ranks."""
    preset = chosen(args)
    # The loader draws a seed for its workers when it starts. With a generator of its own it leaves
    # torch's alone, whose state a resumed run must find as it was saved.
    return DataLoader(
        Rows(numbers, length=args.length, seed=args.seed),
        batch_size=preset.micro_batch,
        num_workers=min(preset.num_workers, cpus_of_this_rank()),
        pin_memory=preset.pin_memory and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
    )


def cpus_of_this_rank() -> int:
    """Return its share of the CPUs that the ranks of this node may use."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def train(accelerator: Accelerator, args: argparse.Namespace, interrupt: Interrupt) -> bool:
    """Train from the start or the newest checkpoint; False where it was told to leave earlier."""
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
        # accelerate counts passes. A checkpoint lies between steps, and with another accumulation
        # the count that was saved would cut steps in their middle.
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
    """Train, and leave the group of ranks when nothing of the training is left."""
    interrupt = Interrupt()
    accelerator = start_accelerator(args)
    # The ranks of a world would take it at different steps: there the run's own save is the way.
    if accelerator.num_processes == 1 and (runtime is None or runtime.info() is None):
        interrupt.listen()
    is_done = train(accelerator, args, interrupt)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()  # closes the trackers, too
    if interrupt.came and not is_done:
        how = "without clusterrun nothing is saved"
        if runtime is not None:
            how = "the same command with --resume continues from there"
        sys.stderr.write(f"interrupted: {how}\n")
        raise SystemExit(INTERRUPTED)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--preset", choices=["auto", *PRESETS], default="auto", help="auto: by the device's memory")
    add("--device", choices=["auto", "cpu"], default="auto", help="cpu: even where there is a GPU")
    add("--batch-size", type=count, metavar="ROWS", help="of a rank and pass (or the preset's)")
    add("--accumulation", "--gradient-accumulation", type=count, metavar="PASSES", help="to a step")
    add("--hidden-dim", type=count, metavar="WIDTH", help="of the model (or the preset's)")
    add("--n-layers", type=count, metavar="N", help="of the model (or the preset's)")
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="less memory, a third more work (default: no)",
    )
    add("--no-mixed-precision", action="store_true", help="compute in fp32")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--max-steps", type=count, default=400, help="optimizer steps (default 400)"
    )
    length.add_argument("--max-epochs", type=count, help=f"epochs of {EPOCH_ROWS} rows, instead")
    add("--length", type=count, default=10, help="digits of a row (default 10)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    add("--warmup", type=count, default=40, help="optimizer steps of warm-up (default 40)")
    add("--seed", type=int, default=0)
    add("--log-every", type=count, default=20, metavar="STEPS")
    add(
        *("--wandb", "--use-wandb"),
        action="store_true",
        help="track with Weights & Biases; its key: WANDB_API_KEY",
    )
    add("--tensorboard", type=folder, metavar="DIR", help="write TensorBoard's files there")
    add("--output", type=folder, metavar="DIR", help="of checkpoints (in a run: its own; or 'out')")
    add("--save-every", type=count, default=100, metavar="STEPS")
    add(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="resume from the newest checkpoint (in a run: always); one that is named must be it",
    )
    add(
        "--override",
        type=lambda text: text.replace("-", "_").split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint's: {', '.join(OVERRIDABLE)}",
    )
    args = parser.parse_args(argv)
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is no learning rate")
    if runtime is None and (args.output or args.resume):
        parser.error("checkpoints need clusterrun: pip install clusterrun")
    own = runtime.checkpoint_dir() if runtime is not None else None
    named = args.resume.parent if isinstance(args.resume, Path) else None
    args.output = args.output or named or own or Path("out")
    # The run's own directory holds nothing but what its earlier attempts have saved.
    attempt = runtime.info() if runtime is not None else None
    if attempt and args.tensorboard:
        args.tensorboard /= attempt.run_dir.name  # curves of other runs would be drawn into its own
    # A checkpoint that was named is what the first attempt went on from.
    is_later = attempt is not None and attempt.attempt > 1
    args.resume = is_later or args.resume or args.output == own
    if args.override and not args.resume:
        parser.error("--override is for a resumed run: pass --resume")
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
