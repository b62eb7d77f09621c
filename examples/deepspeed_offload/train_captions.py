"""Train a small vision-language model to caption images; the launcher shards and offloads it.

The script knows nothing of nodes or DeepSpeed: the number of ranks, their precision and what is in
host memory come from the launcher. It resumes from the newest complete checkpoint of its directory,
and refuses one with which the training would not be the same.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from captioner import PATCH, Captioner
from options import OVERRIDABLE, parse_arguments
from pairs import BY_CHANCE, IGNORED, SIDE, START, Pairs
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from clusterrun import runtime

HELD_OUT_SEED = 1_000_000  # draws different images than any training seed
NO_WEIGHTS = (pickle.UnpicklingError, EOFError, KeyError, TypeError)  # torch.load of other files
PLACES = (SIDE // PATCH) ** 2  # an image's share of --model-max-length


def say(line: str) -> None:
    """Print a line with a single write, so that lines of several ranks never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def strategy(accelerator: Accelerator) -> str:
    """Return the strategy that shards the training's state."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return str(accelerator.distributed_type.value).lower()
    zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    keys = {"optimizer": "offload_optimizer", "weights": "offload_param"}
    if zero["stage"] < 3:
        del keys["weights"]  # accepted there, and unused
    on_host = [what for what, key in keys.items() if zero.get(key, {}).get("device") == "cpu"]
    offload = f", {' and '.join(on_host)} in host memory" if on_host else ""
    return f"deepspeed zero-{zero['stage']}{offload}"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The state that the steps need; without `store` nothing is saved."""

    accelerator: Accelerator
    args: argparse.Namespace
    model: nn.Module
    optimizer: Any
    store: Any

    def step(self, batches: Iterator[tuple[Tensor, Tensor]], rate: float) -> float:
        """Learn from the batches of one step; return the loss of all ranks in nats per word."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = []
        for _ in range(self.args.accumulation):
            images, captions = next(batches)
            with self.accelerator.accumulate(self.model):
                loss = caption_loss(self.model, images, captions)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return float(self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean"))

    def save(self, step: int) -> bool:
        """Save a checkpoint and print its path; return whether it was saved."""
        path = self.store.save(step, lambda folder: self.accelerator.save_state(str(folder)))
        if path and self.accelerator.is_main_process:
            say(f"saved {path}")
        return path is not None

    def is_saving(self, step: int, *, asked: bool) -> bool:
        """Return whether a checkpoint is due after this step."""
        every = self.args.save_every
        return asked or step == self.args.max_steps or bool(every and step % every == 0)


def caption_loss(model: nn.Module, images: Tensor, captions: Tensor) -> Tensor:
    """Return the mean loss of a word, given the image and the words before it.

    This is the mean over captions of their means, so it does not depend on how a batch is divided.
    """
    start = torch.full_like(captions[:, :1], START)
    before = captions[:, :-1].clamp(min=START)
    logits = model(images, torch.cat([start, before], dim=1)).float()
    losses = functional.cross_entropy(
        logits.transpose(1, 2), captions, ignore_index=IGNORED, reduction="none"
    )
    return (losses.sum(dim=1) / (captions != IGNORED).sum(dim=1)).mean()


def caption(model: nn.Module, images: Tensor, length: int) -> Tensor:
    """Return the most likely caption of each image, word by word.

    The ranks of ZeRO-3 gather each other's weights in every pass: all take the same number.
    """
    words = torch.full((len(images), 1), START, device=images.device)
    for _ in range(length):
        words = torch.cat([words, model(images, words)[:, -1:].argmax(dim=-1)], dim=1)
    return words[:, 1:]


def announce(accelerator: Accelerator, args: argparse.Namespace, model: nn.Module) -> None:
    """Print where each rank is, and on rank 0 the world, its strategy, model and batch."""
    host = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    world = accelerator.num_processes
    say(f"rank {accelerator.process_index}/{world} on {host} device {accelerator.device.type}")
    if not accelerator.is_main_process:
        return
    say(f"strategy {strategy(accelerator)}, precision {accelerator.mixed_precision}")
    frozen = ", the projector is frozen" if args.pretrain_mm_mlp_adapter else ""
    say(f"model {sum(parameter.numel() for parameter in model.parameters())} parameters{frozen}")
    parts = f"{args.batch_size} x {args.accumulation} accumulation x {world} ranks"
    say(f"batch {parts} = {effective_batch(accelerator, args)} pairs a step")
    if (loaders := workers(args)) < args.workers:
        say(f"note: --workers is {args.workers}, but there are CPUs for {loaders} only")


def effective_batch(accelerator: Accelerator, args: argparse.Namespace) -> int:
    """Return the pairs that one optimizer step takes over all ranks."""
    return int(args.batch_size * args.accumulation * accelerator.num_processes)


def workers(args: argparse.Namespace) -> int:
    """Return the number of loader processes of a rank, at most its CPUs."""
    return min(args.workers, len(os.sched_getaffinity(0)))


def loader(
    pairs: Any, args: argparse.Namespace, indices: range
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the pairs of these indices in order; accelerate deals the batches to the ranks."""
    # A separate generator keeps torch's state unchanged, as a resumed run must find it.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        pairs,
        batch_size=args.batch_size,
        sampler=indices,
        generator=generator,
        num_workers=workers(args),
    )


def datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the training and test data: a folder's images, or drawn ones."""
    most_words = (args.model_max_length or sys.maxsize) - PLACES
    if not args.data_path:
        train = Pairs(args.seed, sys.maxsize, most_words=most_words)
        return train, Pairs(HELD_OUT_SEED, args.held_out, most_words=most_words)
    try:
        from image_folder import ImageFolder

        parts = [
            ImageFolder(
                args.image_folder,
                args.data_path,
                most_words=most_words,
                held_out=args.held_out,
                seed=seed,
            )
            for seed in (args.seed, None)
        ]
    except ImportError as error:
        raise SystemExit(
            f"error: the package {error.name} is missing\n"
            "  hint: pip install '.[train,examples]' in a clone of clusterrun"
        ) from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: can't use these captions: {error}") from error
    return parts[0], parts[1]


def settings(accelerator: Accelerator, args: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Return the settings that two runs of the same training must share."""
    names = ("seed", "width", "layers", "lr", "warmup", "model_max_length")
    return {name: getattr(args, name) for name in names} | {
        "effective_batch": effective_batch(accelerator, args),
        "data": digest,
        "frozen": bool(args.pretrain_mm_mlp_adapter),
        "sharding": strategy(accelerator),
        "precision": accelerator.mixed_precision,
    }


def start_accelerator(args: argparse.Namespace) -> Accelerator:
    """Join the world; its size and strategy come from the environment."""
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        mixed_precision="bf16" if args.bf16 else None,
    )
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(accelerator.num_processes):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but accelerate did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Values in a DeepSpeed JSON win; the flags replace "auto".
        config = accelerator.deepspeed_plugin.deepspeed_config
        if isinstance(passes := config.get("gradient_accumulation_steps"), int):
            accelerator.gradient_accumulation_steps = passes
        if isinstance(batch_size := config.get("train_micro_batch_size_per_gpu"), int):
            args.batch_size = batch_size
    elif args.deepspeed:
        raise SystemExit(
            f"error: the launcher ignored {args.deepspeed}, and would train without DeepSpeed"
            f"\n  hint: use clusterrun submit --deepspeed-config {args.deepspeed} ..."
        )
    args.accumulation = accelerator.gradient_accumulation_steps  # the environment may decide it
    return accelerator


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed.

    A gloo process that exits without destroying its group can abort at exit; one whose model is
    freed after the group can hang there (torch 2.13).
    """
    accelerator = start_accelerator(args)
    set_seed(args.seed)
    train_and_report(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_and_report(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint to the last step, and caption new images."""
    train, test = datasets(args)
    model = build(args, train)
    announce(accelerator, args, model)
    now = settings(accelerator, args, train.digest)
    store = newest = None
    if args.output:
        store = runtime.Checkpoints(
            args.output, keep=args.keep, settings=now, override=args.override
        )
        # Each shard belongs to one rank: the number of ranks must not change.
        newest = store.resumable(accelerator.num_processes, overridable=OVERRIDABLE)
    first = newest.step if newest else 0
    effective = effective_batch(accelerator, args)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, batches, tests = accelerator.prepare(
        model,
        torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.01),
        loader(train, args, range(first * effective, args.max_steps * effective)),
        loader(test, args, range(args.held_out)),
    )
    if newest:
        accelerator.load_state(str(newest.path))
        if accelerator.is_main_process:
            left = "" if first < args.max_steps else f", nothing is left of {args.max_steps} steps"
            say(f"resumed from {newest.path} at step {first}{left}")
    training = Training(
        accelerator=accelerator, args=args, model=model, optimizer=optimizer, store=store
    )
    if train_steps(training, iter(batches), first):
        report(training, tests, train)
        if args.save_adapter:
            save_adapter(accelerator, model, args.save_adapter)


def build(args: argparse.Namespace, data: Any) -> Captioner:
    """Return the model; an adapter from a file becomes its frozen projector."""
    model = Captioner(
        side=SIDE,
        words=len(data.words),
        places=args.model_max_length or PLACES + data.longest,
        width=args.width,
        layers=args.layers,
    )
    if args.gradient_checkpointing:
        model.recompute()
    if args.pretrain_mm_mlp_adapter:
        try:
            weights = torch.load(args.pretrain_mm_mlp_adapter, weights_only=True)
            model.projector.load_state_dict(weights)
        except (*NO_WEIGHTS, OSError, RuntimeError) as error:
            raise SystemExit(
                f"error: {args.pretrain_mm_mlp_adapter} is not a projector of this model: {error}"
            ) from error
        model.projector.requires_grad_(False)
    return model


def save_adapter(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Write the projector's weights for --pretrain-mm-mlp-adapter; ZeRO-3 gathers them first."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        prefix = "projector."
        weights = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        torch.save(weights, path)
        say(f"adapter in {path}")


def train_steps(training: Training, batches: Iterator[Any], first: int) -> bool:
    """Take the remaining steps; return False if the job asked to save and exit."""
    args, accelerator = training.args, training.accelerator
    for step in range(first + 1, args.max_steps + 1):
        rate = args.lr * min(1.0, step / args.warmup)
        loss = training.step(batches, rate)
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


def report(training: Training, tests: Any, data: Any) -> None:
    """Caption images outside the training, and count the correct words."""
    accelerator, model = training.accelerator, training.model
    model.eval()
    told, true = [], []
    with torch.no_grad():
        for images, captions in tests:
            guess = caption(model, images, data.longest)
            pair = accelerator.gather_for_metrics((guess, captions))
            told.append(pair[0].cpu())
            true.append(pair[1].cpu())
    said, meant = torch.cat(told), torch.cat(true)
    if not accelerator.is_main_process:
        return
    is_word = meant != IGNORED
    right = (said == meant)[is_word].float().mean()
    whole = ((said == meant) | ~is_word).all(dim=1).float().mean()
    chance = "" if data.digest else f" (by chance {BY_CHANCE:.0%})"
    truth, guess = (
        " ".join(data.words[word] for word in row[0][is_word[0]]) for row in (meant, said)
    )
    say(f"an image of a {truth} is called a {guess}")
    words = f"{right:.0%} of the words right{chance}"
    say(f"held-out {len(said)} images: {words}, {whole:.0%} of the captions")


if __name__ == "__main__":
    run(parse_arguments())
