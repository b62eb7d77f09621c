"""What is suspect about a run that exited with status 0, and what only looks like it."""

from __future__ import annotations

from typing import Any

from clusterrun.diagnosis.kinds import Doubt
from clusterrun.diagnosis.training import PrintedTraining
from clusterrun.node.recovery.suspicions import SAVED_BYTES, Success, suspicions_of
from clusterrun.rundir.events import Event, EventType


def event(kind: EventType, **fields: Any) -> Event:
    return Event(at=1.0, type=kind, attempt=1, node="n1", **fields)


def begun(step: int, total: int | None) -> Event:
    return event(EventType.RESUMED, step=step, total=total, is_trainer=True)


def step(number: int, total: int, **more: Any) -> Event:
    return event(EventType.STEP, step=number, total=total, **more)


def losses(count: int = 20, last: float = 2.3026, *, is_constant: bool = True) -> Event:
    about = {"count": count, "last": last, "is_constant": is_constant}
    return event(EventType.LOSSES, **about, is_finite=last == last)


def wrote(size: int) -> Event:
    return event(EventType.PEAKS, written_bytes=size)


def printed(*texts: str) -> PrintedTraining:
    found = PrintedTraining()
    found.feed(texts)
    return found


def kinds(*events: Event, **more: Any) -> list[Doubt]:
    more = {"printed": printed(), **more}
    return [each.kind for each in suspicions_of(Success(events=events, **more))]


NAN, LOOKED = float("nan"), event(EventType.RESUMED)
UNSAVED = event(EventType.UNSAVED, step=9, reason="No space left on device")
FLAT = printed(*["step 3 loss 2.3026"] * 20)
ZERO = printed(*["step 3 loss 0.0000"] * 20)
LOST = printed(*(f"step {number} loss nan" for number in range(9)))
REWARDED = printed("reward 0.4")
OTHER = printed(*(f"loss {2.5 / n:.4f}" for n in range(1, 9)))
STEPPED = (LOOKED, step(1, 9), step(9, 9), wrote(SAVED_BYTES - 1))


def test_a_success_that_did_nothing() -> None:
    assert kinds(begun(0, 9)) == [Doubt.NO_STEP]
    assert kinds(begun(4, 9), step(4, 9)) == [Doubt.NO_STEP]
    assert kinds(step(0, 9)) == [Doubt.NO_STEP]
    assert kinds(LOOKED) == [Doubt.NO_STEP]
    assert kinds(*STEPPED) == [Doubt.NO_CHECKPOINT]
    assert kinds(UNSAVED) == [Doubt.NO_CHECKPOINT]
    assert kinds(losses(9, NAN, is_constant=False)) == [Doubt.LOSS_NOT_FINITE]
    assert kinds(printed=LOST) == [Doubt.LOSS_NOT_FINITE]
    assert kinds(losses()) == kinds(printed=FLAT) == kinds(printed=ZERO) == [Doubt.LOSS_CONSTANT]


def test_what_only_looks_like_it() -> None:
    innocent: dict[str, list[Doubt]] = {
        "a script that reports nothing, or only evaluates": kinds(),
        "resumed, and complete": kinds(begun(9, 9), step(9, 9)),
        "the same in Lightning": kinds(begun(9, None)),
        "one step": kinds(begun(0, 1), step(1, 1)),
        "optimizers that Lightning does not count": kinds(begun(0, 9), step(0, 9)),
        "one step, counted from 0": kinds(step(0, 1)),
        "left after its first step": kinds(step(0, 9, metrics={"loss": 1})),
        "evaluates, or was complete": kinds(LOOKED, has_checkpoint=True),
        "steps, and reports none": kinds(LOOKED, event(EventType.ASKS)),
        "printed steps": kinds(LOOKED, printed=OTHER),
        "saved": kinds(*STEPPED, has_checkpoint=True),
        "never saves": kinds(*STEPPED[1:]),
        "saves in its own way": kinds(*STEPPED, wrote(SAVED_BYTES)),
        "what it wrote is unknown": kinds(*STEPPED[:-1]),
        "a Trainer that is not to save": kinds(*STEPPED, begun(0, 9)),
        "an earlier checkpoint": kinds(UNSAVED, has_checkpoint=True),
        "its own losses are right": kinds(losses(9, is_constant=False), printed=LOST),
        "too few": kinds(losses(19)),
        "its own losses change": kinds(losses(is_constant=False), printed=FLAT),
        "GRPO": kinds(losses(last=0.0), printed=REWARDED),
    }
    assert {name: found for name, found in innocent.items() if found} == {}


def test_printed_losses_that_never_change() -> None:
    texts = {
        "step {} loss 2.3026": True,
        "step {} loss: 0.0000": True,
        "step {} aux loss 0.0000 lm loss 2.3{}26": False,
        "step {} loss 2.30": False,  # its changes may be smaller
        "step {} loss 1.0e-05": False,
        "step {} loss 2.3{}26": False,
        "{}%|##  | {}/100 [00:01<00:09, 9.9it/s, loss=2.3026]": False,  # printed again, not new
        "step {} val loss 2.3026": False,
    }
    for text, is_constant in texts.items():
        found = printed(*(text.format(*[number] * 2) for number in range(10, 40))).losses
        assert found.is_constant is is_constant, text
        assert (found.count >= 20) or not is_constant


def test_printed_losses_that_end_as_nan() -> None:
    good = [f"step {number} loss {3 - number / 99:.4f}" for number in range(9)]
    bad = [f"step {number} loss nan" for number in range(9, 14)]
    assert not printed(*good, *bad).losses.is_finite
    assert printed(*good, *bad, "step 14 loss 2.5123", "step 15 loss 2.5122").losses.is_finite
    assert printed(*good, "eval loss nan").losses.is_finite
