"""What makes a run suspect that exited with status 0: it may have trained nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from clusterrun.diagnosis.kinds import Doubt, Suspicion
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.training import TrainingLog, losses_in
from clusterrun.shared.wording import count

LEAST_REPORTS: Final = 20  # of one loss: fewer may be chance
LEAST_DIGITS: Final = 4  # of a printed loss: fewer hide its changes
LEAST_SAME: Final = 3  # losses that two ranks print alike, if they train the same model apart
SAVED_BYTES: Final = 1 << 20  # a rank that wrote as much may have saved in its own way

_BAR: Final = re.compile(r"\d%\||\b(?:it/s|s/it)\b")  # is printed again with the same loss
_REWARD: Final = re.compile(r"(?i)\breward")  # the loss of a policy may be 0 by its definition


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of a training: how many, the last, and whether it never changed."""

    count: int = 0
    last: float | None = None  # None: not finite
    is_constant: bool = False
    is_finite: bool = True


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Where a Trainer began: a step, and the total that it announced (None: unknown)."""

    step: int
    total: int | None


@dataclass(frozen=True, kw_only=True)
class SuccessFacts:
    """What an attempt reported that exited with status 0, and what its ranks printed.

    `begun` are the trainings that a Trainer began. `steps` are the first and the last step
    reported, `has_metrics` whether with metrics. `looked_for_checkpoint` means that the script
    looked for its checkpoints; `has_checkpoint`, that the run has one; `asked_to_save`, that the
    script called should_checkpoint(). `unsaved` is why the last save failed. `written_bytes` is the
    most that a rank wrote (None: unknown). `alone` are the ranks that never joined others, `alike`
    those that printed the same losses as another.
    """

    begun: tuple[Begun, ...] = ()
    steps: tuple[int, int] | None = None
    total: int | None = None
    has_metrics: bool = False
    looked_for_checkpoint: bool = False
    has_checkpoint: bool = False
    asked_to_save: bool = False
    unsaved: str = ""
    written_bytes: int | None = None
    reported: Losses = Losses()
    printed: Losses = Losses()
    has_printed_steps: bool = False
    has_rewards: bool = False
    alone: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    world_size: int = 1


def suspicions_of(facts: SuccessFacts) -> tuple[Suspicion, ...]:
    """Return what is suspect; nothing about a script that reports nothing."""
    return tuple(_doubts(facts))


def _doubts(facts: SuccessFacts) -> Iterator[Suspicion]:
    if text := _no_step(facts):
        yield Suspicion(kind=Doubt.NO_STEP, text=f"no step was taken: {text}")
    elif text := _no_checkpoint(facts):
        yield Suspicion(kind=Doubt.NO_CHECKPOINT, text=f"no checkpoint was saved: {text}")
    if not (facts.reported if facts.reported.count else facts.printed).is_finite:
        yield Suspicion(kind=Doubt.LOSS_NOT_FINITE, text="the last loss is NaN or infinite")
    elif found := _constant(facts):
        value = f"{found.last:.6g}"
        text = f"the loss never changed: it was {value} in all {found.count} reports"
        yield Suspicion(kind=Doubt.LOSS_CONSTANT, text=text)
    if len(facts.alone & facts.alike) > 1:
        ranks = count(facts.world_size, "rank")
        text = f"the {ranks} formed no common world: each trained alone"
        yield Suspicion(kind=Doubt.SEPARATE_WORLDS, text=text)


def _no_step(facts: SuccessFacts) -> str:
    last = facts.steps[1] if facts.steps else None
    if begun := next((each for each in facts.begun if not _is_through(each)), None):
        # A Trainer whose own loop steps reports step 0 with each batch.
        is_idle = last is None or 0 < begun.step == last
        of = "" if begun.total is None else f" of {begun.total}"
        return f"the training began at step {begun.step}{of} and ended there" if is_idle else ""
    if facts.begun:
        return ""
    if last == 0 and (facts.total or 0) > 1 and not facts.has_metrics:
        return f"the script reported step 0 of {facts.total}, and none after it"
    is_idle = last is None and not (facts.asked_to_save or facts.has_checkpoint)
    if is_idle and facts.looked_for_checkpoint and not facts.has_printed_steps:
        return "the script found no checkpoint, reported no step and saved nothing"
    return ""


def _is_through(begun: Begun) -> bool:
    """Return whether the training may have been complete: it resumed at its end."""
    return begun.step > 0 and (begun.total is None or begun.step >= begun.total)


def _no_checkpoint(facts: SuccessFacts) -> str:
    if facts.has_checkpoint:
        return ""
    if facts.unsaved:
        return facts.unsaved
    wrote_nothing = facts.written_bytes is not None and facts.written_bytes < SAVED_BYTES
    saves = facts.looked_for_checkpoint and not facts.begun  # a Trainer saves as it is asked to
    if saves and facts.steps is not None and facts.steps[1] > 0 and wrote_nothing:
        return "the script looked for one to resume from, and saved none"
    return ""


def _constant(facts: SuccessFacts) -> Losses | None:
    for found in (facts.reported, facts.printed):
        if found.count >= LEAST_REPORTS:
            is_by_definition = found.last == 0 and facts.has_rewards
            return found if found.is_constant and not is_by_definition else None
    return None


@dataclass(kw_only=True)
class PrintedTraining:
    """What one rank printed of its training: feed it the first and the last lines of its log."""

    has_rewards: bool = False
    _log: TrainingLog = field(default_factory=TrainingLog)
    _lines: list[tuple[str, ...]] = field(default_factory=list)

    def feed(self, texts: Iterable[str]) -> None:
        """Take the next lines."""
        for text in texts:
            self._log.feed(PrintedLine(number=0, text=text))
            self.has_rewards |= _REWARD.search(text) is not None
            if not _BAR.search(text) and (found := losses_in(text)):
                self._lines.append(found)

    @property
    def has_steps(self) -> bool:
        """Return whether it printed a step or a loss."""
        return self._log.steps > 0

    @property
    def losses(self) -> Losses:
        """Return the losses that it printed, outside of progress bars."""
        is_constant = len(set(self._lines)) == 1 and all(map(_is_exact, self._lines[0]))
        return Losses(
            count=len(self._lines),
            last=float(self._lines[-1][0]) if is_constant else None,
            is_constant=is_constant,
            is_finite=not self._log.is_nan,
        )

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """Return its losses as printed, if they can tell two trainings apart; else ()."""
        exact = [each for each in self._lines if all(map(_is_exact, each))]
        return tuple(exact) if len(set(exact)) >= LEAST_SAME else ()


def _is_exact(loss: str) -> bool:
    """Return whether a printed loss shows small changes; 0 does, as a loss never is."""
    digits = re.sub(r"[eE].*|\D", "", loss).lstrip("0")
    return not digits or len(digits) >= LEAST_DIGITS


def alike(printed: dict[int, PrintedTraining]) -> frozenset[int]:
    """Return the ranks that printed the same losses as another."""
    series = {rank: each.series for rank, each in printed.items()}
    known = [each for each in series.values() if each]
    return frozenset(rank for rank, each in series.items() if each and known.count(each) > 1)
