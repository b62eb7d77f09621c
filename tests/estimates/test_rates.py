"""The learning rate of another batch, by both rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import Optimizer
from clusterrun.estimates.steps import Rates, scaled

BATCHES = st.integers(1, 1 << 20)


def test_the_guides_rate_of_4_at_16() -> None:
    assert scaled(1.25e-6, 4, 16) == Rates(
        linear=5.0e-6,
        sqrt=2.5e-6,
        ratio=4.0,
        notes=(
            "batches under 256 may need no scaling: try the old rate first; the linear rule starts"
            " at 256 (Goyal et al., arXiv:1706.02677)",
            "for the Adam family, theory suggests the square root "
            "(Malladi et al., arXiv:2205.10287)",
        ),
    )


def test_the_rate_of_16_at_256() -> None:
    rates = scaled(1.0e-5, 16, 256)
    assert rates.linear == pytest.approx(1.6e-4)
    assert rates.sqrt == pytest.approx(4.0e-5)
    assert rates.notes[0].startswith("x16: warm the rate up")


def test_an_unchanged_batch_changes_nothing() -> None:
    assert scaled(3e-4, 64, 64) == Rates(linear=3e-4, sqrt=3e-4, ratio=1.0, notes=())


@pytest.mark.parametrize(("batch", "warns"), [(2048, False), (2049, True)])
def test_warm_up_is_advised_above_eight_times_the_batch(batch: int, *, warns: bool) -> None:
    notes = scaled(1e-4, 256, batch, optimizer=Optimizer.SGD).notes
    assert any("warm the rate up" in note for note in notes) is warns


@pytest.mark.parametrize(("batch", "small"), [(255, True), (256, False)])
def test_batches_under_256_may_need_no_scaling(batch: int, *, small: bool) -> None:
    notes = scaled(1e-4, 32, batch, optimizer=Optimizer.SGD).notes
    assert any("may need no scaling" in note for note in notes) is small


@pytest.mark.parametrize("optimizer", Optimizer)
def test_the_square_root_is_named_for_the_adam_family_alone(optimizer: Optimizer) -> None:
    notes = scaled(1e-4, 512, 1024, optimizer=optimizer).notes
    assert any("square root" in note for note in notes) is (
        optimizer.value in {"adamw", "adam8bit"}
    )


@given(base=BATCHES, batch=BATCHES)
def test_the_square_root_lies_between_the_old_rate_and_the_linear_one(
    base: int, batch: int
) -> None:
    rates = scaled(1.0, base, batch)
    low, high = sorted((1.0, rates.linear))
    assert low <= rates.sqrt <= high
    assert rates.linear == rates.ratio
