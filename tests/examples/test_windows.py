"""Which text a rank reads is decided by the number of the window alone."""

import pytest
import tiny_gpt
import torch
import train_lm
from accelerate.data_loader import BatchSamplerShard

pytestmark = pytest.mark.torch

# each pair of bytes is its own place in the text
TEXT = b"".join(place.to_bytes(2, "big") for place in range(2560))


def windows(seed: int = 0) -> tuple[tiny_gpt.Windows, tiny_gpt.Windows]:
    return tiny_gpt.split_windows(TEXT, seq_len=16, held_out=8, seed=seed)


def place(window: tuple[torch.Tensor, torch.Tensor]) -> int:
    high, low = window[0][:2].tolist()
    return 2 * (256 * high + low)


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = windows()[0][5]
    start = place((inputs, targets))
    assert bytes(inputs.tolist()) == TEXT[start : start + 16]
    assert bytes(targets.tolist()) == TEXT[start + 1 : start + 17]


def test_every_window_is_trained_on_once_an_epoch_or_held_out() -> None:
    train, test = windows()
    trained = [place(train[g]) for g in range(len(train))]
    held_out = [place(test[g]) for g in range(len(test))]
    assert 1 <= len(held_out) <= 8
    assert sorted([*trained, *held_out]) == list(range(0, len(TEXT) - 16, 16))
    assert trained != sorted(trained)


def test_a_window_far_into_a_run_needs_none_of_those_before() -> None:
    train, fresh = windows()[0], windows()[0]
    walked = [train[g] for g in range(2 * len(train) + 3)]
    assert torch.equal(walked[-1][0], fresh[2 * len(train) + 2][0])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    train, other = windows(seed=0)[0], windows(seed=9)[0]
    orders = {
        tuple(place(train[g]) for g in range(len(train))),
        tuple(place(train[len(train) + g]) for g in range(len(train))),
        tuple(place(other[g]) for g in range(len(other))),
    }
    assert len(orders) == 3


def test_worlds_with_the_same_batch_take_the_same_windows_in_a_step() -> None:
    def step(number: int, *, processes: int, batch: int, accumulation: int) -> list[int]:
        size = processes * batch * accumulation
        taken = []
        for rank in range(processes):
            loader = train_lm.loader(windows()[0], batch, range(number * size, 5 * size))
            shard = BatchSamplerShard(loader.batch_sampler, processes, rank)
            taken += [
                g for batch_, _ in zip(shard, range(accumulation), strict=False) for g in batch_
            ]
        return sorted(taken)

    expected = list(range(48, 64))
    assert step(3, processes=1, batch=4, accumulation=4) == expected
    assert step(3, processes=2, batch=4, accumulation=2) == expected
    assert step(3, processes=4, batch=2, accumulation=2) == expected


def test_too_little_text_is_said() -> None:
    with pytest.raises(ValueError, match="100 bytes of text are fewer than 10 windows of 16"):
        tiny_gpt.split_windows(TEXT[:100], seq_len=16, held_out=8, seed=0)
