"""What a log shows of the training itself: its steps, its losses, and that it completed."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine

STEPS: Final = 3  # new steps after a sign: it stopped nothing
_SILENT_S: Final = 3600.0
_MOST_LOSSES: Final = 1000
_JUMP: Final = 1.5  # of a loss in nats that noise does not reach

_STEP: Final = re.compile(
    r"\b(?:iteration|iter|global_step|step|Step|Iteration|batch)['\"]?\s*[:=#]?\s*(?P<n>\d+)\b"
    r"|\b\d{1,3}%\|[^|]*\| (?P<bar>\d+)/\d+ \[|\[(?P<of>\d+)/\d+\]|'epoch': (?P<epoch>[\d.]+)"
)
_LOSS: Final = re.compile(
    r"(?<!valid )(?<!validation )(?<!eval_)(?<!test )"
    r"\b(?:lm |train(?:ing)?[ _]|avg[ _])?(?:loss|Loss|per_token_loss)['\"]?(?: value)?"
    r"\s*[:=|]?\s*['\"]?(?:tensor\()?"
    r"(?P<loss>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|-?nan|-?inf|NaN|Inf)\b"
)
_SIDE_WORK: Final = re.compile(
    r"(?i)\b(?:loading|download|tokeniz|map|generating|fetch|eval|valid|saving|extract|shards?)"
    r"|^\[\d+/\d+\] \S*(?:c\+\+|g\+\+|gcc|clang|nvcc|hipcc|ccache)"  # ninja
)
_SCALE: Final = re.compile(r"\bloss scale: (?P<scale>[\d.]+)")
_OVERFLOW: Final = re.compile(r"(?i)\boverflow\b.*\bskip|gradient overflow|reducing loss scale to")
_COMPLETE: Final = re.compile(
    r"(?i)\btraining (?:is )?(?:complete|completed|finished|done|has (?:finished|completed))\b"
    r"|'train_runtime'|\btrain_runtime\s*=|`Trainer\.fit` stopped: `max_(?:steps|epochs)"
    r"|\[exiting program (?:after|at) |\bfinished training\b|\bdone training\b"
    r"|\bjob (?:completed|finished) successfully\b"
)
_DONE: Final = ("done", "done!", "done.")  # before the steps, something else is done


@dataclass(kw_only=True)
class TrainingLog:
    """Follows a log line by line."""

    steps: int = 0  # how often a step number or a loss changed, of the rank that shows most
    is_complete: bool = False
    nan_losses: int = 0  # in succession, the newest included
    overflows: int = 0  # of fp16, since the last step that was not skipped
    last_step: PrintedLine | None = None
    first_nan: PrintedLine | None = None
    silent_until: float | None = None
    silent_from: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_LOSSES))
    _seen: dict[str, tuple[str, int]] = field(default_factory=dict)  # by process: step and count
    _scale: float = 0.0

    def feed(self, line: PrintedLine) -> None:
        """Take the next line."""
        text = line.text
        if line.at is not None:
            self.silent_from = self.silent_from or line.at
            self.silent_until = line.at
        low = text.lower()
        if "overflow" in low or "loss scale" in low:
            self.overflows += bool(_OVERFLOW.search(text))
        if _COMPLETE.search(low) or (self.steps and low in _DONE):
            self.is_complete = True
            return
        loss = _LOSS.search(text) if "loss" in low else None
        step = None if _SIDE_WORK.search(text) else _STEP.search(text)
        if not (loss or step):
            return
        seen = (step[0] if step else "") + (loss[0] if loss else "")
        before, count = self._seen.get(line.source, ("", 0))
        if seen == before:
            return
        self._seen[line.source] = seen, count + 1
        self.steps = max(self.steps, count + 1)
        self.is_complete = False
        self.last_step, self.silent_from, self.silent_until = line, line.at, line.at
        self._read_numbers(line, loss["loss"] if loss else None)

    def _read_numbers(self, line: PrintedLine, loss: str | None) -> None:
        if scale := _SCALE.search(line.text):
            new = float(scale["scale"])
            self.overflows = self.overflows + 1 if loss is None and new < self._scale else 0
            self._scale = new
        if loss is None:
            return
        value = float(loss.lower().replace("infinity", "inf"))
        if math.isfinite(value):
            self.losses.append(value)
            self.nan_losses, self.first_nan = 0, None
        else:
            self.nan_losses += 1
            self.first_nan = self.first_nan or line

    @property
    def is_nan(self) -> bool:
        """Return whether the loss became NaN or infinite and stayed so."""
        return self.nan_losses >= STEPS or (self.nan_losses > 0 and self.is_last_nan)

    @property
    def is_last_nan(self) -> bool:
        """Return whether the last loss of a short log is not finite."""
        return self.nan_losses > 0 and len(self.losses) <= STEPS

    @property
    def is_diverged(self) -> bool:
        """Return whether the last losses are far above the best ones before them."""
        if len(self.losses) < 2:
            return False
        values = list(self.losses)
        tail = values[-min(STEPS, len(values) // 2) :]
        best = min(values[: len(values) - len(tail)])
        return max(tail) > max(1.5 * best, best + _JUMP) and min(tail) > 1.08 * best > 0

    @property
    def silent_s(self) -> float:
        """Return for how long the log shows the time and no step."""
        if self.last_step is None or self.silent_from is None or self.silent_until is None:
            return 0.0
        return self.silent_until - self.silent_from

    @property
    def is_stuck(self) -> bool:
        """Return whether steps ended long before the log does."""
        return self.silent_s >= _SILENT_S
