"""Choose the checkpoint to resume from, and keep the newest ones whole and the best as weights."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from clusterrun import runtime

STATE = "train_state.json"
WEIGHTS = "model.safetensors"  # as accelerate names them
OVERRIDABLE = ("lr", "warmup")  # for --override
_BEST = re.compile(r"step-\d+-loss-(\d+\.\d+)\.safetensors")


class Saved:
    """The checkpoints of a training: the newest, and the weights with the lowest held-out losses.

    Weights are a third of a checkpoint: AdamW keeps two more numbers for each weight.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: Path | None,
        *,
        keep: int,
        best: int,
        settings: Mapping[str, Any],
        override: Collection[str],
    ) -> None:
        self.accelerator, self.most = accelerator, best
        self.store = runtime.Checkpoints(directory, keep=keep, settings=settings, override=override)
        self.best = self.store.directory / "best"
        self.found = self.store.resumable(overridable=OVERRIDABLE)
        # The number of lanes stays the same as at the start of the training.
        self.lanes = accelerator.num_processes
        if self.found:
            self.lanes = json.loads((self.found.path / STATE).read_text())["lanes"]

    def load(self) -> int:
        """Load the newest complete checkpoint; return its step, 0 if there is none."""
        if self.found is None:
            return 0
        self.accelerator.load_state(str(self.found.path))
        self.accelerator.step = 0  # checkpoints are between steps, never within an accumulation
        return int(self.found.step)

    def save(self, step: int, loss: float | None) -> Path | None:
        """Save, and keep the weights if they are among the best; return None if the disk is full.

        `loss` is the held-out loss, None if there was no time to measure it.
        """

        def write(folder: Path) -> None:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                (folder / STATE).write_text(json.dumps({"lanes": self.lanes}))

        path = self.store.save(step, write)
        if path and loss is not None and self.accelerator.is_main_process:
            keep_if_best(path / WEIGHTS, self.best, step, loss, self.most)
        return path


def keep_if_best(weights: Path, folder: Path, step: int, loss: float, most: int) -> None:
    """Keep a file of weights under a name with its loss if it is one of the `most` best."""
    for old in folder.glob(f"step-{step:08d}-*"):
        old.unlink()  # from this step before the training was set back
    found = best(folder)
    better = [path for path, other in found.items() if other <= loss]
    if not math.isfinite(loss) or len(better) >= most:
        return
    folder.mkdir(exist_ok=True)
    for worse in list(found)[most - 1 :]:
        worse.unlink()
    name = folder / f"step-{step:08d}-loss-{loss:.4f}.safetensors"
    try:
        os.link(weights, name)  # takes no room while the checkpoint exists
    except OSError:  # a file system without links
        shutil.copyfile(weights, name)


def best(folder: Path) -> dict[Path, float]:
    """Return the kept weights with their losses, the best first."""
    matches = ((path, _BEST.fullmatch(path.name)) for path in folder.glob("step-*"))
    losses = {path: float(match[1]) for path, match in matches if match}
    return dict(sorted(losses.items(), key=lambda item: (item[1], item[0])))
