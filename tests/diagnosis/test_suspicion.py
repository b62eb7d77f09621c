"""What is suspect about a run that exited with status 0, and what only looks like it."""

from __future__ import annotations

import dataclasses

import pytest

from clusterrun.diagnosis.suspicion import (
    SAVED_BYTES,
    Begun,
    Doubt,
    Losses,
    PrintedTraining,
    SuccessFacts,
    alike,
    suspicions_of,
)

FLAT = Losses(count=20, last=2.3026, is_constant=True)
LOOKED = SuccessFacts(looked_for_checkpoint=True)
STEPPED = dataclasses.replace(LOOKED, steps=(1, 9), total=9, written_bytes=SAVED_BYTES - 1)


def kinds(facts: SuccessFacts) -> list[Doubt]:
    return [each.kind for each in suspicions_of(facts)]


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (SuccessFacts(begun=(Begun(step=0, total=9),)), Doubt.NO_STEP),
        (SuccessFacts(begun=(Begun(step=4, total=9),), steps=(4, 4)), Doubt.NO_STEP),
        (SuccessFacts(steps=(0, 0), total=9), Doubt.NO_STEP),
        (LOOKED, Doubt.NO_STEP),
        (STEPPED, Doubt.NO_CHECKPOINT),
        (SuccessFacts(unsaved="step 9: No space left on device"), Doubt.NO_CHECKPOINT),
        (SuccessFacts(reported=Losses(count=9, is_finite=False)), Doubt.LOSS_NOT_FINITE),
        (SuccessFacts(printed=Losses(count=9, is_finite=False)), Doubt.LOSS_NOT_FINITE),
        (SuccessFacts(reported=FLAT), Doubt.LOSS_CONSTANT),
        (SuccessFacts(printed=FLAT), Doubt.LOSS_CONSTANT),
        (SuccessFacts(printed=dataclasses.replace(FLAT, last=0.0)), Doubt.LOSS_CONSTANT),
        (
            SuccessFacts(alone=frozenset({0, 1}), alike=frozenset({0, 1}), world_size=4),
            Doubt.SEPARATE_WORLDS,
        ),
    ],
)
def test_a_success_that_did_nothing(facts: SuccessFacts, kind: Doubt) -> None:
    assert kinds(facts) == [kind]


@pytest.mark.parametrize(
    "facts",
    [
        SuccessFacts(),  # a script that reports nothing, or only evaluates
        SuccessFacts(begun=(Begun(step=9, total=9),), steps=(9, 9)),  # resumed, and complete
        SuccessFacts(begun=(Begun(step=9, total=None),)),  # the same in Lightning
        SuccessFacts(begun=(Begun(step=0, total=1),), steps=(1, 1)),
        SuccessFacts(
            begun=(Begun(step=0, total=9),), steps=(0, 0)
        ),  # optimizers that Lightning counts not
        SuccessFacts(steps=(0, 0), total=1),  # one step, counted from 0
        SuccessFacts(steps=(0, 0), total=9, has_metrics=True),  # left after its first step
        dataclasses.replace(LOOKED, has_checkpoint=True),  # evaluates, or was complete
        dataclasses.replace(LOOKED, asked_to_save=True),  # steps, and reports none
        dataclasses.replace(LOOKED, has_printed_steps=True),
        dataclasses.replace(STEPPED, has_checkpoint=True),
        dataclasses.replace(STEPPED, looked_for_checkpoint=False),  # never saves
        dataclasses.replace(STEPPED, written_bytes=SAVED_BYTES),  # saves in its own way
        dataclasses.replace(STEPPED, written_bytes=None),
        dataclasses.replace(
            STEPPED, begun=(Begun(step=0, total=9),)
        ),  # a Trainer asked not to save
        SuccessFacts(unsaved="step 4: No space left on device", has_checkpoint=True),
        SuccessFacts(reported=Losses(count=9), printed=Losses(count=9, is_finite=False)),
        SuccessFacts(reported=dataclasses.replace(FLAT, count=19)),
        SuccessFacts(reported=Losses(count=20), printed=FLAT),
        SuccessFacts(reported=dataclasses.replace(FLAT, last=0.0), has_rewards=True),  # GRPO
        SuccessFacts(alone=frozenset({0, 1}), alike=frozenset()),  # a search over settings
        SuccessFacts(alike=frozenset({0, 1})),  # one world whose ranks print the same mean
    ],
)
def test_what_only_looks_like_it(facts: SuccessFacts) -> None:
    assert kinds(facts) == []


def printed(*texts: str) -> PrintedTraining:
    found = PrintedTraining()
    found.feed(texts)
    return found


@pytest.mark.parametrize(
    ("text", "is_constant"),
    [
        ("step {} loss 2.3026", True),
        ("step {} loss: 0.0000", True),
        ("step {} aux loss 0.0000 lm loss 2.3{}26", False),
        ("step {} loss 2.30", False),  # its changes may be smaller
        ("step {} loss 1.0e-05", False),
        ("step {} loss 2.3{}26", False),
        ("{}%|##  | {}/100 [00:01<00:09, 9.9it/s, loss=2.3026]", False),  # printed again, not new
        ("step {} val loss 2.3026", False),
        ("generating sample {}", False),
    ],
)
def test_printed_losses_that_never_change(text: str, is_constant: bool) -> None:
    found = printed(*(text.format(*[number] * 2) for number in range(10, 40))).losses
    assert found.is_constant is is_constant
    assert (found.count >= 20) or not is_constant


def test_printed_losses_that_end_as_nan() -> None:
    good = [f"step {number} loss {3 - number / 99:.4f}" for number in range(9)]
    bad = [f"step {number} loss nan" for number in range(9, 14)]
    assert not printed(*good, *bad).losses.is_finite
    assert printed(*good, *bad, "step 14 loss 2.5123", "step 15 loss 2.5122").losses.is_finite
    assert printed(*good, "eval loss nan").losses.is_finite


def test_ranks_that_print_the_same_losses() -> None:
    one, other = (
        printed(*(f"step {number} loss {start / number:.4f}" for number in range(1, 9)))
        for start in (2.5, 2.6)
    )
    assert alike({0: one, 1: one, 2: other, 3: printed("ready")}) == {0, 1}
    assert not printed("ready").has_steps
    flat = printed(*(f"step {number} loss 2.3026" for number in range(1, 9)))
    assert alike({0: flat, 1: flat}) == frozenset()  # they may be told so


def test_the_reward_of_a_policy_is_seen() -> None:
    assert printed("{'loss': 0.0, 'reward': 0.4, 'epoch': 0.1}").has_rewards
    assert not printed("{'loss': 0.0, 'epoch': 0.1}").has_rewards
