"""Track curves with TensorBoard or Weights & Biases, in addition to the log."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

PROJECT = "small-transformer"


def names(args: argparse.Namespace) -> list[str]:
    """Return accelerate's names of the requested trackers; stop if a package is missing.

    accelerate would silently continue without it.
    """
    asked = [("tensorboard", args.tensorboard), ("wandb", args.wandb)]
    found = [name for name, wanted in asked if wanted]
    for name in found:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # W&B's directory ./wandb has no origin
            raise SystemExit(
                f"error: --{name} needs the package {name}\n  hint: pip install {name}"
            )
    return found


def start(accelerator: Accelerator, config: Mapping[str, Any], run_id: str | None) -> None:
    """Open the requested trackers on rank 0, with the settings of this run.

    With a run id, W&B shows all attempts of a run as one curve.
    """
    wandb_options = {"id": run_id, "resume": "allow"} if run_id else {}
    try:
        accelerator.init_trackers(PROJECT, dict(config), {"wandb": wandb_options})
    except Exception as error:
        if not is_of_wandb(error):
            raise
        raise SystemExit(
            f"error: W&B did not start: {error}\n"
            "  hint: export WANDB_API_KEY and submit with --pass-env WANDB_API_KEY, or submit with "
            "--env WANDB_MODE=offline"
        ) from error


def is_of_wandb(error: Exception) -> bool:
    """Return whether an error comes from W&B: no key, no network, no such project."""
    return type(error).__module__.partition(".")[0] == "wandb"
