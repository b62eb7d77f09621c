"""Which checkpoint a run goes on from, and which are kept: the newest, and the best."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from clusterrun import runtime

STATE = "train_state.json"
OVERRIDABLE = ("lr", "warmup")  # for --override
NEWEST = 2  # should the newest be damaged, a resume takes the one before


class Saved:
    """The checkpoints of a training, of which the newest and those of the least loss stay."""

    def __init__(
        self,
        accelerator: Accelerator,
        directory: Path | None,
        *,
        best: int,
        settings: Mapping[str, Any],
        override: Collection[str],
    ) -> None:
        self.accelerator, self.best = accelerator, best
        # Which may go is decided here, by the loss: the store itself lets go of none.
        self.store = runtime.Checkpoints(
            directory, keep=1 << 30, settings=settings, override=override
        )

    def resume(self) -> int:
        """Load the newest complete checkpoint; return its step, 0 where there is none."""
        found = self.store.resumable(self.accelerator.num_processes, overridable=OVERRIDABLE)
        if found is None:
            return 0
        self.accelerator.load_state(str(found.path))
        self.accelerator.step = 0  # checkpoints lie between steps, none within an accumulation
        return found.step

    def save(self, step: int, loss: float | None) -> Path | None:
        """Save, and let go of what is neither new nor good; None where the disk took it not.

        `loss` is that on held-out rows, None where nobody had the time to find it.
        """

        def write(folder: Path) -> None:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                (folder / STATE).write_text(json.dumps({"held_out_loss": loss}))

        path = self.store.save(step, write)
        if path and self.accelerator.is_main_process:
            for old in spare(self.store.directory, path, self.best):
                shutil.rmtree(old, ignore_errors=True)
        return path


def spare(directory: Path, newest: Path, best: int) -> list[Path]:
    """Return the checkpoints up to `newest` that are neither among the newest nor the best.

    Those beyond it, of a training that was set back, are not touched.
    """
    found = sorted(path for path in directory.glob("step-*") if path.name <= newest.name)
    measured = {path: loss for path in found if (loss := held_out_loss(path)) is not None}
    good = sorted(measured, key=lambda path: (measured[path], path))[:best]
    return sorted({*found} - {*found[-NEWEST:]} - {*good})


def held_out_loss(checkpoint: Path) -> float | None:
    """Return the loss that a checkpoint was saved with; None where it has none, or is broken."""
    try:
        loss = json.loads((checkpoint / STATE).read_text())["held_out_loss"]
    except (OSError, ValueError):
        return None
    return None if loss is None else float(loss)
