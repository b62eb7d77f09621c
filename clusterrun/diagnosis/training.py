"""What a log shows of the training itself: its steps, its losses, and that it completed."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.logformat.bars import COUNTER, NINJA

STEPS: Final = 3  # new steps after a sign: it stopped nothing
_SILENT_S: Final = 3600.0
_RECENT: Final = 4  # step numbers that other ranks may print again
_MOST_LOSSES: Final = 1000  # of a slow rise
_USUAL: Final = 20  # losses that the last ones are compared with
_JUMP, _RATIO, _HIGH, _MANY_TIMES = 1.5, 1.4, 5.0, 10.0  # of a diverged loss: noise stays below
_ABOVE: Final = 1.08  # times the usual loss: no noise
_LEAST_BLOCK, _BLOCKS, _RISE, _TWICE = 3, 5, 0.7, 2.0  # of a loss that rose slowly
_OVERFLOWS: Final = 4  # skipped steps at the end of a log, after _SETTLED good ones
_OVERFLOWS_AT_START: Final = 20  # a loss scale of 2**16 is searched downwards in fewer
_SETTLED: Final = 20

_STEP: Final = re.compile(
    rf"{COUNTER.pattern}|\b\d{{1,3}}%\|[^|]{{0,400}}\| {{0,20}}\d{{1,18}}/\d{{1,18}} \["
)
_STEP_WORDS: Final = ("step", "[", "iter", "batch", "%|", "num_updates", "epoch")
_NUMBER: Final = r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,9})?|[-+]?(?i:nan|inf(?:inity)?)"
_LOSS: Final = re.compile(
    r"\b(?:(?:lm|avg|total)[ _]|(?:reduced_)?[Tt]rain(?:ing)?[ _/])?"
    r"(?:(?:CrossEntropy)?[Ll]oss|LOSS|per_token_loss)"
    r"(?:_(?:step|epoch|net|total)|/train/total| train)?"
    r"['\"]?(?: value| is)?\s{0,20}[:=|]?\s{0,20}['\"]?"
    rf"(?:tensor\()?(?P<loss>{_NUMBER})(?![\w/])"
)
_NO_LOSS: Final = re.compile(  # of a validation, or of a progress bar before its first step
    r"(?i)\b(?:val|valid|validation|eval|evaluation|test)\b|\| {0,20}0/\d{1,18} \["
)
_NORM: Final = re.compile(
    r"(?i)\bg(?:rad(?:ient)?[_ ])?norm['\"]?\s{0,20}[:=|]?\s{0,20}['\"]?"
    rf"(?:tensor\()?(?P<norm>{_NUMBER})(?![\w/])"
)
_SIDE_WORK: Final = re.compile(
    r"\b(?:loading|download|tokeniz|map\b|generating|fetch|eval|valid|saving|extract|shards?\b"
    r"|building|compil|config\b|(?:from|max|save|log|logging|every|total|warm-?up) step)"
    rf"|{NINJA.pattern}"
)
_SCALE: Final = re.compile(r"\bloss scale: (?P<scale>\d{1,40}(?:\.\d{0,40})?)")
_NEW_SCALE: Final = re.compile(
    r"\b(?:reducing|scale) to:? {0,20}(?P<scale>\d{1,40}(?:\.\d{0,40})?(?:e[-+]?\d{1,9})?)"
)
_LEAST_SCALE: Final = 1.0  # a smaller loss scale helps no training
_OVERFLOW: Final = re.compile(
    r"(?i)\boverflow\b.{0,200}\b(?:skip|setting loss scale to)"
    r"|gradient overflow|reducing loss scale to"
)
_END_WORDS: Final = (
    *("done", "state=", "exit", "complete", "final", "finished", "ended", "end of", "succeeded"),
    *("train_runtime", "trainer.fit", "training time", "training speed", "training progress"),
    *("best metric", "end time"),
)
_COMPLETE: Final = re.compile(
    r"\btraining (?:is |was |run )?(?:successfully )?"
    r"(?:complete|completed|finished|done|has (?:finished|completed)|ended successfully)\b"
    r"|'train_runtime'|\btrain_runtime\s{0,20}=|`trainer\.fit` stopped: `max_(?:steps|epochs|time)"
    r"|\[exiting program (?:after|at) |\b(?:finished|completed) training\b|\bdone training\b"
    r"|\b(?:job|run|script|experiment)(?: is| has| was)? ?(?:completed?|finished|ended)"
    r" (?:successfully|without errors?)\b|\bend of training\b"
    r"|\b(?:fine-?tuning|pre-?training) (?:is |has )?(?:completed?|finished|done)\b"
    r"|\bprocess \d+ exits successfully\b|\bjobstate=completed\b|\bstate=completed exitcode=0:0"
    r"|\bstate: completed\b|\(?(?:workerstate\.)?succeeded\)|worker\.status\.succeeded"
    r"|\bworker group successfully finished\b|^(?:total )?training time:? {0,20}\d"
    r"|\boverall training speed\b|\btotal training time\b|\bepochs completed in\b"
    r"|\*\*\* best metric|^.{0,40}\bend time of running main\b|\btraining progress: {0,20}100%"
    r"|\bsaved (?:the )?final (?:model|checkpoint)"
)
# transformers prints it once more at the end
_FULL_BAR: Final = re.compile(r"\| {0,20}(\d{1,18})/\1 \[")
_BAR: Final = re.compile(r"\d%\||\b(?:it/s|s/it)\b")  # is printed again with the same loss
_REWARD: Final = re.compile(r"(?i)\breward")  # the loss of a policy may be 0 by its definition
_LEAST_DIGITS: Final = 4  # of a printed loss: fewer hide its changes
_DONE: Final = ("done", "done!", "done.", "all done")  # before the steps, something else is done


def losses_in(text: str) -> tuple[str, ...]:
    """Return the losses of a training that a line shows, as printed."""
    is_shown = "loss" in text.lower() and _loss(text)
    return tuple(found["loss"] for found in _LOSS.finditer(text)) if is_shown else ()


def _loss(text: str) -> re.Match[str] | None:
    found = _LOSS.search(text)
    return None if found and _NO_LOSS.search(text[: found.start()]) else found


@dataclass(kw_only=True)
class TrainingLog:
    """Follows a log line by line."""

    steps: int = 0  # how often a step number or a loss changed
    is_complete: bool = False
    nan_losses: int = 0  # in succession, the newest included
    nan_norms: int = 0  # gradient norms of steps without a loss, likewise
    overflows: int = 0  # of fp16, since the last step that was not skipped
    last_step: PrintedLine | None = None
    first_nan: PrintedLine | None = None
    silent_until: float | None = None
    silent_from: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_LOSSES))
    _seen: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _scale: float = 0.0  # the loss scale; 0: none was printed
    _overflow: str = ""  # how the last line about one ended
    _overflow_at: int = 0  # the step of the last overflow or loss scale
    _is_skipping: bool = False  # no loss since the last skipped step

    def feed(self, line: PrintedLine) -> None:
        """Take the next line; a new step number counts as a step, else a new loss does."""
        text = line.text
        if line.at is not None:
            self.silent_from = self.silent_from or line.at
            self.silent_until = line.at
        low = text.lower()
        if "overflow" in low or "loss scale" in low:
            self._read_overflow(text)
        is_end = any(map(low.__contains__, _END_WORDS)) and _COMPLETE.search(low)
        if is_end or (self.steps and low in _DONE):
            self.is_complete = True
            return
        loss = _loss(text) if "loss" in low else None
        step = _STEP.search(low) if any(map(low.__contains__, _STEP_WORDS)) else None
        if step and _SIDE_WORK.search(low):
            step = None
        progress = step or loss
        if not progress or (self.is_complete and _FULL_BAR.search(low)):
            return
        self._read_numbers(line, loss["loss"] if loss else None)
        if progress[0] in self._seen:  # printed by another rank, or once more
            return
        self._seen.append(progress[0])
        self.steps += 1
        self.is_complete = False
        self.last_step, self.silent_from, self.silent_until = line, line.at, line.at

    def _read_overflow(self, text: str) -> None:
        """Count skipped steps in succession; a line that ends like the last one is of its step."""
        found = _OVERFLOW.search(text)
        if not found or text[found.end() :] == self._overflow:
            return
        self.overflows = self.overflows + 1 if self._is_after_overflow else 1
        self._overflow, self._overflow_at = text[found.end() :], self.steps
        self._is_skipping = True
        if new := _NEW_SCALE.search(text):
            self._scale = float(new["scale"])

    @property
    def _is_after_overflow(self) -> bool:
        return self.steps - self._overflow_at < STEPS

    def _read_numbers(self, line: PrintedLine, loss: str | None) -> None:
        """Follow the `loss` of a step, and the gradient norm and loss scale that the line shows."""
        low = line.text.lower()
        if "loss scale: " in low and (scale := _SCALE.search(line.text)):
            new = float(scale["scale"])
            is_skipped = loss is None and new < self._scale  # an overflow lowers the scale
            self.overflows = self.overflows + 1 if is_skipped else 0
            self._scale, self._overflow_at = new, self.steps
        norm = _NORM.search(low) if "norm" in low else None
        value = float(loss.lower()) if loss else None
        if norm and not value:  # no loss, or 0 from transformers' logging_nan_inf_filter
            if not math.isfinite(float(norm["norm"])):
                self.nan_norms += 1
                self.first_nan = self.first_nan or line
                return
            self.nan_norms = 0
        if value is None:
            return
        if math.isfinite(value):
            self.losses.append(value)
            self._is_skipping = False
            self.nan_losses = self.nan_norms = 0
            self.first_nan = None
        else:
            self.nan_losses += 1
            self.first_nan = self.first_nan or line

    @property
    def is_overflowing(self) -> bool:
        """Return whether fp16 steps were skipped at the end, by more overflows than are usual."""
        has_least_scale = self._is_skipping and 0 < self._scale <= _LEAST_SCALE
        is_past_start = len(self.losses) >= _SETTLED or has_least_scale
        enough = _OVERFLOWS if is_past_start else _OVERFLOWS_AT_START
        if self.is_diverged:
            enough = 1  # it explains the loss
        return self._is_after_overflow and self.overflows >= enough

    @property
    def is_nan(self) -> bool:
        """Return whether the loss stayed NaN or infinite; of few losses, the last one decides."""
        # With a larger loss scale, fp16 may still be searching for one: NaN norms are usual.
        has_nan_norms = self.nan_norms > 1 and self._scale <= _LEAST_SCALE
        is_last_of_few = (self.nan_losses > 0 or has_nan_norms) and len(self.losses) <= STEPS
        return max(self.nan_losses, self.nan_norms) >= STEPS or is_last_of_few

    @property
    def is_diverged(self) -> bool:
        """Return whether the last losses are far above the usual ones before them."""
        values = list(self.losses)
        return _has_jumped(values) or _has_risen(values)

    @property
    def is_stuck(self) -> bool:
        """Return whether steps ended long before the log does."""
        since, until = self.silent_from or 0.0, self.silent_until or 0.0
        return self.last_step is not None and since > 0 and until - since >= _SILENT_S


def _has_jumped(values: list[float]) -> bool:
    """Return whether the last losses are all above the usual one, and on average far above it."""
    tail = values[-min(STEPS, len(values) - 1) :]
    usual = values[: -len(tail)][-_USUAL:]
    if not usual:
        return False
    import statistics  # slow to import, and most logs have no losses

    base, level = statistics.median(usual), statistics.fmean(tail)
    are_all_above = min(tail) > _ABOVE * base > 0
    is_far_above = level > max(_RATIO * base, base + _JUMP)
    return are_all_above and is_far_above and level > min(_HIGH, _MANY_TIMES * base)


def _has_risen(values: list[float]) -> bool:
    """Return whether the losses rose slowly, by more than their noise, and stayed high."""
    size = max(_LEAST_BLOCK, len(values) // _BLOCKS)
    starts = range(len(values) % size, len(values), size)
    blocks = [sorted(values[start : start + size]) for start in starts]
    if len(blocks) < STEPS:
        return False
    import statistics

    lowest, last = min(blocks[:-1], key=statistics.median), blocks[-1]
    base, level = statistics.median(lowest), statistics.median(last)
    highest = max(map(statistics.median, blocks))
    outliers = size // 10  # of each block
    is_apart = last[outliers] > lowest[-1 - outliers] > 0  # the blocks do not overlap
    is_far = level > min(_TWICE * base, max(_RATIO * base, base + _JUMP))
    # Above 1, up by _RISE at least, and still above _RISE times the highest.
    return is_apart and is_far and level > max(1.0, base + _RISE, _RISE * highest)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of a training: how many, the last, and whether it never changed."""

    count: int = 0
    last: float | None = None  # None: not finite, or (printed) not constant
    is_constant: bool = False
    is_finite: bool = True


@dataclass(kw_only=True)
class PrintedTraining:
    """What one rank printed of its training: feed it the first and the last lines of its log."""

    has_rewards: bool = False
    log: TrainingLog = field(default_factory=TrainingLog)
    _lines: list[tuple[str, ...]] = field(default_factory=list)

    def feed(self, texts: Iterable[str]) -> None:
        """Take the next lines."""
        for text in texts:
            self.log.feed(PrintedLine(number=0, text=text))
            self.has_rewards |= _REWARD.search(text) is not None
            if not _BAR.search(text) and (found := losses_in(text)):
                self._lines.append(found)

    @property
    def losses(self) -> Losses:
        """Return the losses that it printed, outside of progress bars."""
        is_constant = len(set(self._lines)) == 1 and all(map(_is_exact, self._lines[0]))
        return Losses(
            count=len(self._lines),
            last=float(self._lines[-1][0]) if is_constant else None,
            is_constant=is_constant,
            is_finite=not self.log.is_nan,
        )


def _is_exact(loss: str) -> bool:
    """Return whether a loss has the digits to show small changes; 0 counts: no real loss is 0."""
    digits = re.sub(r"[eE].*|\D", "", loss).lstrip("0")
    return not digits or len(digits) >= _LEAST_DIGITS
