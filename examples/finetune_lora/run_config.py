"""The record of a run, `run_config.json`: its settings, where it ran, and its versions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adapters import Preset

from clusterrun import runtime

NAME = "run_config.json"
PACKAGES = ("clusterrun", "torch", "transformers", "peft", "accelerate", "deepspeed")
# Flags that may change on a resume; all others affect the result.
# Batch size and accumulation are compared as the effective batch, their product with the ranks.
FREE_BATCH = ("accumulation", "batch_size", "gradient_checkpointing")
FREE = frozenset((*FREE_BATCH, "keep", "log_every", "output", "override", "resume"))
OVERRIDABLE = ("epochs", "lr", "warmup")  # for --override
WHOLE = ("one process", "ddp")  # strategies whose checkpoints any number of ranks can load


def describe(
    args: argparse.Namespace, preset: Preset, *, data: dict[str, Any], world: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of the record that is known before the first step."""
    ranks = world["ranks"]
    info = runtime.info()
    return {
        "flags": {name: _plain(value) for name, value in sorted(vars(args).items())},
        "adapters": dataclasses.asdict(preset) | {"targets": list(preset.targets)},
        "data": data,
        "world": world,
        "batch": {
            "micro_batch": args.batch_size,
            "accumulation": args.accumulation,
            "ranks": ranks,
            "effective_batch": args.batch_size * args.accumulation * ranks,
        },
        "overrides": [],
        "versions": {"python": platform.python_version()} | installed(),
        "run": {"job_id": info.job_id, "attempt": info.attempt} if info else None,
    }


def installed() -> dict[str, str]:
    """Return the versions of the relevant packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that a resume must not change but would, with old and new value."""
    was, is_now = _decisive(before), _decisive(now)
    pairs = {name: (was.get(name), is_now.get(name)) for name in sorted({*was, *is_now})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _decisive(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a run and its resume must share."""
    flags = {name: value for name, value in record["flags"].items() if name not in FREE}
    strategy, ranks = record["world"]["strategy"], record["world"]["ranks"]
    return {
        **flags,
        **record["adapters"],
        **record["data"],
        "precision": record["world"]["precision"],
        "effective_batch": record["batch"]["effective_batch"],
        "checkpoints": "whole" if strategy in WHOLE else f"{ranks} shards of {strategy}",
    }


def read(output: Path) -> dict[str, Any] | None:
    """Return the record in a directory; None if there is none."""
    try:
        record: dict[str, Any] = json.loads((output / NAME).read_text())
    except FileNotFoundError:
        return None
    return record


def write(output: Path, record: dict[str, Any]) -> None:
    """Write the record completely or not at all."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / f".{NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(output / NAME)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
