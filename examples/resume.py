"""Check that a run may resume from a checkpoint, and save and load the state."""

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
    """Return the windows that one optimizer step takes over all ranks."""
    return int(args.batch_size * args.accumulation * accelerator.num_processes)


def settings(accelerator: Accelerator, args: argparse.Namespace, corpus: bytes) -> dict[str, Any]:
    """Return the settings that two runs of the same training must share."""
    names = "seed seq_len layers heads width dropout lr warmup weight_decay clip max_steps held_out"
    return {name: getattr(args, name) for name in names.split()} | {
        "format": checkpoint_format(accelerator),
        "precision": accelerator.mixed_precision,
        "effective_batch": effective_batch(accelerator, args),
        "deepspeed": deepspeed_choices(accelerator),
        "text_sha256": hashlib.sha256(corpus).hexdigest(),
    }


def checkpoint_to_resume(store: Any, accelerator: Accelerator, args: argparse.Namespace) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start anew.

    Whole checkpoints (one process, DDP) may resume with another number of ranks: the settings with
    the effective batch are equal, so every step has the same windows and learning rate.
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
            "  hint: pass --resume to continue from the newest, or choose another --output"
        )
    return None


def check_division(saved: Any, accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Report that steps are divided differently than before; refuse it with --exact."""
    state = json.loads((saved.path / STATE).read_text())
    was = (saved.world_size, state.get("accumulation", args.accumulation))
    if was == (accelerator.num_processes, args.accumulation):
        return
    if args.exact:
        raise SystemExit(
            f"error: can't resume from {saved.path}: accumulation was {was[1]} and is "
            f"{args.accumulation}, but --exact needs the same sums\n"
            f"  hint: use --accumulation {was[1]}, or omit --exact"
        )
    if args.dropout and accelerator.is_main_process:
        print("note: the batch is divided differently: dropout draws other masks", flush=True)


def write(folder: Path, accelerator: Accelerator, state: Mapping[str, Any]) -> None:
    """Write everything that a resume needs; call on every rank (ZeRO and FSDP have shards)."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        passes = {"accumulation": accelerator.gradient_accumulation_steps}
        (folder / STATE).write_text(json.dumps({**state, **passes}))


def load(folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    """Load weights, optimizer, schedule and random numbers; return the state given to `write`."""
    accelerator.load_state(str(folder))
    # accelerate counts micro-batches to know when a step is complete. A checkpoint is between
    # steps; with another accumulation, the saved count would end steps too early or late.
    accelerator.step = 0
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
