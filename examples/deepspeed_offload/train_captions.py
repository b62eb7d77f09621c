"""Train a small vision-language model to caption images, sharded and offloaded from outside.

The script knows nothing of nodes and of DeepSpeed: how many ranks there are, their precision and
what lies in the host's memory come from whoever launches it. It goes on from the newest complete
checkpoint of its directory, and refuses one that it could not go on from truly.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from captioner import Captioner
from pairs import BY_CHANCE, CHOICES, SIDE, START, WORDS, Pairs, text
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from clusterrun import runtime

HELD_OUT_SEED = 1_000_000  # draws other images than any seed of a training


def say(line: str) -> None:
    """Print one line in one piece, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def strategy(accelerator: Accelerator) -> str:
    """Return what shards the training's state."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return str(accelerator.distributed_type.value).lower()
    zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    keys = {"optimizer": "offload_optimizer", "weights": "offload_param"}
    on_host = [what for what, key in keys.items() if zero.get(key, {}).get("device") == "cpu"]
    offload = f", {' and '.join(on_host)} in host memory" if on_host else ""
    return f"deepspeed zero-{zero['stage']}{offload}"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold what the steps need; without `store` nothing is saved."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    store: Any

    def step(self, images: Tensor, captions: Tensor, rate: float) -> float:
        """Learn from one batch of pairs; return this rank's loss in nats a word."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = caption_loss(self.model, images, captions)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, step: int) -> bool:
        """Save a checkpoint and say where it lies; say whether the disk took it."""
        path = self.store.save(step, lambda folder: self.accelerator.save_state(str(folder)))
        if path and self.accelerator.is_main_process:
            say(f"saved {path}")
        return path is not None

    def is_saving(self, step: int, *, asked: bool) -> bool:
        """Say whether a checkpoint is due after this step."""
        every = self.args.save_every
        return asked or step == self.args.max_steps or bool(every and step % every == 0)


def caption_loss(model: nn.Module, images: Tensor, captions: Tensor) -> Tensor:
    """Return the mean loss of a word, told the image and the words before it."""
    start = torch.full_like(captions[:, :1], START)
    logits = model(images, torch.cat([start, captions[:, :-1]], dim=1))
    return functional.cross_entropy(logits.flatten(0, 1).float(), captions.flatten())


def caption(model: nn.Module, images: Tensor) -> Tensor:
    """Return the likeliest caption of each image, word by word.

    The ranks of ZeRO-3 gather each other's weights in every pass: all take the same number.
    """
    words = torch.full((len(images), 1), START, device=images.device)
    for _ in CHOICES:
        words = torch.cat([words, model(images, words)[:, -1:].argmax(dim=-1)], dim=1)
    return words[:, 1:]


def announce(accelerator: Accelerator, args: argparse.Namespace, model: nn.Module) -> None:
    """Print where each rank is; from rank 0 the world, what shards it, model and batch."""
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    world = accelerator.num_processes
    say(f"rank {accelerator.process_index}/{world} on {host} device {accelerator.device.type}")
    if not accelerator.is_main_process:
        return
    say(f"strategy {strategy(accelerator)}, precision {accelerator.mixed_precision}")
    say(f"model {sum(parameter.numel() for parameter in model.parameters())} parameters")
    say(f"batch {args.batch_size} x {world} ranks = {args.batch_size * world} pairs a step")


def loader(pairs: Pairs, batch_size: int, indices: range) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the pairs of these indices in order; accelerate deals the batches to the ranks."""
    # With a generator of its own it leaves torch's alone, whose state a resumed run must find.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(pairs, batch_size=batch_size, sampler=indices, generator=generator)


def settings(accelerator: Accelerator, args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be equal for two runs to be the same training."""
    names = ("seed", "batch_size", "width", "layers", "lr", "warmup")
    return {name: getattr(args, name) for name in names} | {
        "sharding": strategy(accelerator),
        "precision": accelerator.mixed_precision,
    }


def run(args: argparse.Namespace) -> None:
    """Train, and leave the group of ranks when nothing of the training is left.

    A gloo process that leaves without ending its group can abort at its very end; one whose model
    is freed after the group's end can hang there (torch 2.13).
    """
    accelerator = Accelerator()
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher has started {started} ranks, and accelerate did not join them\n"
            "  hint: without GPUs it needs ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would train in fp32, and not say so")
    set_seed(args.seed)
    train_and_report(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_and_report(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last step, and caption new images."""
    model = Captioner(
        side=SIDE, words=len(WORDS), length=len(CHOICES), width=args.width, layers=args.layers
    )
    announce(accelerator, args, model)
    now = settings(accelerator, args)
    store = runtime.Checkpoints(args.output, keep=args.keep, settings=now) if args.output else None
    newest = newest_of(store, accelerator, now) if store else None
    first = newest.step if newest else 0
    effective = args.batch_size * accelerator.num_processes
    indices = range(first * effective, args.max_steps * effective)
    model, optimizer, batches, tests = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01),
        loader(Pairs(args.seed, len(indices)), args.batch_size, indices),
        loader(Pairs(HELD_OUT_SEED, args.held_out), args.batch_size, range(args.held_out)),
    )
    refuse_accumulation(accelerator)
    if newest:
        accelerator.load_state(str(newest.path))
        if accelerator.is_main_process:
            left = "" if first < args.max_steps else f", nothing is left of {args.max_steps} steps"
            say(f"resumed from {newest.path} at step {first}{left}")
    training = Training(
        accelerator=accelerator, args=args, model=model, optimizer=optimizer, store=store
    )
    if train_steps(training, batches, first):
        report(training, tests)


def refuse_accumulation(accelerator: Accelerator) -> None:
    """End where the launcher, or a DeepSpeed JSON, counts several passes as a step."""
    if (passes := accelerator.gradient_accumulation_steps) > 1:
        raise SystemExit(
            f"error: {passes} passes to a step are asked for, and this example has one\n"
            "  hint: gradient_accumulation_steps 1, and a larger --batch-size"
        )


def newest_of(store: Any, accelerator: Accelerator, now: dict[str, Any]) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start afresh."""
    found = store.newest()
    if found and (difference := found.difference(accelerator.num_processes, now)):
        raise SystemExit(
            f"error: can't go on from {found.path}: {difference}\n"
            "  hint: shards belong to a rank each; use the same settings, or another --output"
        )
    return found


def train_steps(training: Training, batches: Any, first: int) -> bool:
    """Take the steps that are left; return False where the job asked to save and leave."""
    args, accelerator = training.args, training.accelerator
    for step, (images, captions) in enumerate(batches, start=first + 1):
        rate = args.lr * min(1.0, step / args.warmup)
        loss = training.step(images, captions, rate)
        if not math.isfinite(loss):
            raise SystemExit(f"error: the loss is {loss} at step {step}: it has diverged")
        runtime.step(step, args.max_steps, loss=loss)
        if accelerator.is_main_process and (step % args.log_every == 0 or step == args.max_steps):
            say(f"step {step}/{args.max_steps} loss {loss:.3f} lr {rate:.1e}")
        if training.store is None:
            continue
        asked = runtime.should_checkpoint()
        saved = training.is_saving(step, asked=asked) and training.save(step)
        if asked and step < args.max_steps and runtime.should_stop():
            if accelerator.is_main_process:
                say(f"stopped at step {step}, {'saved' if saved else 'not saved'}")
            return False
    return True


def report(training: Training, tests: Any) -> None:
    """Caption images that were never seen in the training, and count the words that are right."""
    accelerator, model = training.accelerator, training.model
    model.eval()
    told, true = [], []
    with torch.no_grad():
        for images, captions in tests:
            pair = accelerator.gather_for_metrics((caption(model, images), captions))
            told.append(pair[0].cpu())
            true.append(pair[1].cpu())
    said, meant = torch.cat(told), torch.cat(true)
    if accelerator.is_main_process:
        right = said == meant
        say(f"an image of a {text(meant[0])} is called a {text(said[0])}")
        say(
            f"held-out {len(right)} images: {right.float().mean():.0%} of the words right "
            f"(by chance {BY_CHANCE:.0%}), {right.all(dim=1).float().mean():.0%} of the captions"
        )


def folder(text: str) -> Path:
    """Make a directory unless it is there, for argparse: better now than at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def count(number: str) -> int:
    """Read a whole number from 1."""
    value = int(number)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags; a checkpoint directory of the run's own where clusterrun has started it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--max-steps", type=count, default=200, help="optimizer steps (default 200)")
    add("--batch-size", type=count, default=32, help="pairs of a rank (default 32)")
    add("--width", type=count, default=64, help="width of the decoder, a multiple of 8")
    add("--layers", type=count, default=2, help="blocks of the encoder and of the decoder")
    add("--lr", type=float, default=2e-3, help="learning rate after the warm-up")
    add("--warmup", type=count, default=20, help="steps in which the rate rises")
    add("--held-out", type=count, default=128, help="images to caption at the end")
    add("--seed", type=int, default=0)
    add("--log-every", type=count, default=10, metavar="STEPS")
    add("--save-every", type=count, metavar="STEPS", help="the last step is always saved")
    add("--keep", type=count, default=2, metavar="N", help="checkpoints to keep")
    add(
        "--output",
        type=folder,
        default=runtime.checkpoint_dir(),
        metavar="DIR",
        help="where checkpoints are, shared by all nodes (in a run of clusterrun: the run's own)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is no learning rate")
    if args.width % 8:
        parser.error(f"--width {args.width} is no multiple of 8")
    if args.save_every and not args.output:
        parser.error("--save-every needs --output DIR")
    return args


if __name__ == "__main__":
    run(parse_arguments())
