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


def checkpoint_to_resume(
    store: Any, accelerator: Accelerator, args: argparse.Namespace, now: Mapping[str, Any]
) -> Any:
    """Return the newest complete checkpoint, the same on every rank; None to start afresh."""
    found = store.newest()
    if found is None:
        return None
    if not args.resume:
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to go on from the newest, or another --output"
        )
    reason = refusal(found, accelerator.num_processes, now, exact=args.exact)
    if reason:
        batch = found.settings["effective_batch"]
        raise SystemExit(
            f"error: can't resume from {found.path}: {reason}\n"
            f"  hint: use its settings (batch size x accumulation x processes = {batch}), "
            "or another --output"
        )
    return found


def refusal(saved: Any, world_size: int, now: Mapping[str, Any], *, exact: bool) -> str:
    """Return why a resume would not mean the same as an uninterrupted run, or "".

    Whole checkpoints (one process, DDP) may go on in another world: the settings, which hold the
    effective batch, are equal, so every step sees the same windows and the same learning rate.
    """
    reasons = [saved.difference(saved.world_size, now)]
    world = saved.difference(world_size, saved.settings)
    if world and now["format"] != "whole":
        reasons.append(f"{world}, but each of its shards belongs to one process")
    elif world and now["dropout"] > 0:
        reasons.append(f"{world}, but each process has dropout of its own")
    elif world and exact:
        reasons.append(f"{world}, but the same bits need the same sums")
    return "; ".join(filter(None, reasons))


def write(folder: Path, accelerator: Accelerator, state: Mapping[str, Any]) -> None:
    """Write everything that a resume needs; every rank takes part (ZeRO and FSDP hold shards)."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / STATE).write_text(json.dumps(state))


def load(folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    """Load weights, optimizer, schedule and random numbers; return what `write` was given."""
    accelerator.load_state(str(folder))
    # accelerate counts micro-batches to know when a step is complete. A checkpoint lies between
    # steps, and the count of a world with another accumulation would cut steps in their middle.
    accelerator.step = 0
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
