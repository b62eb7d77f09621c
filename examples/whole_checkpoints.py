"""Checkpoints that are whole or are not used: how they are written, found and judged.

A checkpoint is written under a temporary name by all ranks, renamed, and marked last of all. The
marker lists every file with its size. Whatever cuts a save short leaves something without a valid
marker, and a resume says so and takes the one before.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

MARKER = ".complete"
STATE = "train_state.json"


def step_directory(output: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return output / f"step-{step:08d}"


def saved_steps(output: Path) -> dict[int, Path]:
    """Return the checkpoint directories by step, oldest first, complete or not."""
    if not output.is_dir():
        return {}
    matches = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in output.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def incompleteness(path: Path) -> str | None:
    """Return why a checkpoint can't be used, or None where it is complete."""
    try:
        files = list(json.loads((path / MARKER).read_text())["files"].items())
    except FileNotFoundError:
        return f"it has no {MARKER}: the run ended while it was being saved"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MARKER} can't be read"
    for name, size in files:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def newest_checkpoint(output: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a line about each newer one that is not."""
    notes: list[str] = []
    for path in reversed(saved_steps(output).values()):
        reason = incompleteness(path)
        if reason is None:
            return path, notes
        notes.append(f"checkpoint {path.name} is incomplete and skipped: {reason}")
    return None, notes


def mark_complete(path: Path) -> None:
    """Write the marker, which lists every file with its size, whole and last of all."""
    files = {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    temporary = path / f"{MARKER}.tmp"
    temporary.write_text(json.dumps({"files": files}, indent=1))
    temporary.rename(path / MARKER)


def prune(output: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` complete checkpoints."""
    steps = saved_steps(output)
    complete = [step for step, path in steps.items() if incompleteness(path) is None]
    for step, path in steps.items():
        if complete and step < complete[-keep:][0]:
            shutil.rmtree(path)


def save_checkpoint(
    accelerator: Accelerator, output: Path, keep: int, state: dict[str, Any]
) -> Path:
    """Save everything a resume needs; every rank takes part (ZeRO and FSDP ranks hold shards)."""
    final = step_directory(output, state["step"])
    temporary = output / f".{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / STATE).write_text(json.dumps(state, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        mark_complete(final)
        prune(output, keep)
    accelerator.wait_for_everyone()
    return final


def refusal(saved: dict[str, Any], now: dict[str, Any], *, exact: bool) -> str | None:
    """Return why a resume would not mean the same as an uninterrupted run, or None.

    Whole checkpoints (one process, DDP) may go on in another world: the settings, which hold the
    effective batch, are equal, so every step sees the same windows and the same learning rate.
    """
    old, new = saved["settings"], now["settings"]
    reasons = [
        f"{key} was {old.get(key)} and is {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    ]
    if saved["world_size"] != now["world_size"]:
        world = f"it was saved by {saved['world_size']} processes and these are {now['world_size']}"
        if new["format"] != "whole":
            reasons.append(f"{world}, but each of its shards belongs to one process")
        elif new["dropout"] > 0:
            reasons.append(f"{world}, but each process has dropout of its own")
        elif exact:
            reasons.append(f"{world}, but the same bits need the same sums")
    return "; ".join(reasons) or None
