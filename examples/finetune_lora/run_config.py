"""The record of a run, `run_config.json`: what was asked for, where it ran, with which versions."""

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
# Flags that may change between a run and its resume; all others decide what is learned.
FREE = frozenset(("output", "resume", "keep", "log_every"))


def describe(
    args: argparse.Namespace, preset: Preset, *, data: dict[str, Any], world: dict[str, Any]
) -> dict[str, Any]:
    """Return the record as far as it is known before the first step."""
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
        "versions": {"python": platform.python_version()} | installed(),
        "run": {"job_id": info.job_id, "attempt": info.attempt} if info else None,
    }


def installed() -> dict[str, str]:
    """Return the versions of the packages that take part, where they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say what would make a resume another training; "" where nothing does."""
    was, is_now = _decisive(before), _decisive(now)
    return "; ".join(
        f"{name} was {was.get(name)} and is {is_now.get(name)}"
        for name in sorted({*was, *is_now})
        if was.get(name) != is_now.get(name)
    )


def _decisive(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a run and its resume must share."""
    flags = {name: value for name, value in record["flags"].items() if name not in FREE}
    return flags | record["adapters"] | record["data"] | record["world"]


def read(output: Path) -> dict[str, Any] | None:
    """Return the record in a directory; None where there is none."""
    try:
        record: dict[str, Any] = json.loads((output / NAME).read_text())
    except FileNotFoundError:
        return None
    return record


def write(output: Path, record: dict[str, Any]) -> None:
    """Write the record whole or not at all."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / f".{NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(output / NAME)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
