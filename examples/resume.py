"""What a resumed run must have in common with the one that it goes on with, and what it loads."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from strategies import checkpoint_format, deepspeed_choices

STATE = "train_state.json"
OVERRIDABLE = ("clip", "dropout", "lr", "max_steps", "warmup")  # for --override


def effective_batch(accelerator: Accelerator, args: argparse.Namespace) -> int:
    """Return the windows that one optimizer step takes in the whole world."""
    return int(args.batch_size * args.accumulation * accelerator.num_processes)


def settings(accelerator: Accelerator, args: argparse.Namespace, corpus: bytes) -> dict[str, Any]:
    """Return what must be equal for two runs to be the same training."""
    names = "seed seq_len layers heads width dropout lr warmup weight_decay clip max_steps held_out"
    return {name: getattr(args, name) for name in names.split()} | {
        "format": checkpoint_format(accelerator),
        "precision": accelerator.mixed_precision,
        "effective_batch": effective_batch(accelerator, args),
        "deepspeed": deepspeed_choices(accelerator),
        "text_sha256": hashlib.sha256(corpus).hexdigest(),
    }


def checkpoint_to_resume(store: Any, accelerator: Accelerator, args: argparse.Namespace) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start.

    Whole checkpoints (one process, DDP) may resume in another world: the settings, which hold the
    effective batch, are equal, so every step sees the same windows and the same learning rate.
    Each shard of a ZeRO or FSDP checkpoint belongs to one rank.
    """
    if args.resume:
        is_whole = checkpoint_format(accelerator) == "whole" and not args.exact
        world_size = None if is_whole else accelerator.num_processes
        found = store.resumable(world_size, overridable=OVERRIDABLE)
        if found:
            check_division(found, accelerator, args)
        return found
    if store.newest():
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to go on from the newest, or another --output"
        )
    return None


def check_division(saved: Any, accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Say, or refuse with --exact, that steps are divided in another way than before."""
    state = json.loads((saved.path / STATE).read_text())
    was = (saved.world_size, state.get("accumulation", args.accumulation))
    if was == (accelerator.num_processes, args.accumulation):
        return
    if args.exact:
        raise SystemExit(
            f"error: can't resume from {saved.path}: accumulation was {was[1]} and is "
            f"{args.accumulation}, but --exact needs the same sums\n"
            f"  hint: --accumulation {was[1]}, or leave --exact off"
        )
    if args.dropout and accelerator.is_main_process:
        print("note: the batch is divided in another way: dropout draws other masks", flush=True)


def write(folder: Path, accelerator: Accelerator, state: Mapping[str, Any]) -> None:
    """Write everything that a resume needs; every rank takes part (ZeRO and FSDP hold shards)."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        passes = {"accumulation": accelerator.gradient_accumulation_steps}
        (folder / STATE).write_text(json.dumps({**state, **passes}))


def load(folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    """Load weights, optimizer, schedule and random numbers; return what `write` was given."""
    accelerator.load_state(str(folder))
    # accelerate counts micro-batches to know when a step is complete. A checkpoint lies between
    # steps, and the count of a world with another accumulation would cut steps in their middle.
    accelerator.step = 0
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
