"""The plain example: its learning rate, the windows of text of each rank, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strategies
import tiny_gpt
import torch
import train_lm
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DistributedType
from resume import STATE, check_division
from torch import nn

from clusterrun.runtime import Checkpoint
from tests.examples.worlds import IN_A_RUN

pytestmark = pytest.mark.torch


def test_the_rate_rises_over_the_warm_up_and_falls_to_a_tenth() -> None:
    factors = [train_lm.schedule_factor(step, warmup=4, max_steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.55)
    assert factors[12] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    for warmup, last in ((0, 1), (0, 5), (5, 5), (9, 5)):  # odd lengths
        for n in range(last + 1):
            assert 0 < train_lm.schedule_factor(n, warmup=warmup, max_steps=last) <= 1


def test_deepspeed_gets_max_steps_back_after_accelerates_division() -> None:
    for processes in (1, 2, 8):
        optimizer, scheduler = stand_ins(processes, {"optimizer": {}, "scheduler": {}})
        assert (type(optimizer).__name__, optimizer.lr) == ("DummyOptim", 0.002)
        assert scheduler.total_num_steps / processes == 100
        assert scheduler.warmup_num_steps == 10
    assert stand_ins(2, {"optimizer": {}})[1] is None  # the loop sets the rate
    assert type(stand_ins(2, {})[0]).__name__ == "AdamW"


def test_what_a_deepspeed_config_leaves_to_auto_is_filled_in() -> None:
    params: dict[str, Any] = {"lr": "auto", "betas": "auto", "eps": "auto"}
    config = {"optimizer": {"params": params}, "gradient_clipping": "auto"}
    accelerator: Any = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    strategies.follow_deepspeed(accelerator, train_lm.parse_arguments(["--clip", "0.5"]))
    assert config["gradient_clipping"] == 0.5
    assert params == {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8}  # accelerate fills in lr


def stand_ins(processes: int, config: dict[str, Any]) -> tuple[Any, Any]:
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        deepspeed_plugin=SimpleNamespace(deepspeed_config=config),
        num_processes=processes,
    )
    args = train_lm.parse_arguments(["--max-steps", "100", "--warmup", "10"])
    return strategies.optimizer_and_schedule(accelerator, nn.Linear(2, 2), args)


def test_a_last_step_that_was_not_saved_is_no_good_end() -> None:
    """Else the run would have completed, and its result lie nowhere."""
    training: Any = SimpleNamespace(
        args=SimpleNamespace(max_steps=3, log_every=9, save_every=1),
        store=object(),
        meter=SimpleNamespace(reset=lambda: None, newest={}),
        steps=lambda batches, first: [(1, 0.1), (2, 0.1)],
        log=lambda step, lr: None,
        save=lambda step, state: False,
    )
    assert train_lm.train_steps(training, [], 0, {})
    training.args.max_steps = 2
    with pytest.raises(SystemExit, match="error: step 2, the last, was not saved"):
        train_lm.train_steps(training, [], 0, {})


def test_a_later_attempt_goes_on_whatever_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**IN_A_RUN, "CLUSTERRUN_CHECKPOINT_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for attempt, expected in (("1", (None, False)), ("2", (tmp_path, True))):
        monkeypatch.setenv("CLUSTERRUN_ATTEMPT", attempt)
        args = train_lm.parse_arguments(["--max-steps", "9"])
        assert (args.output, args.resume) == expected


# each pair of bytes is its own place in the text
TEXT = b"".join(place.to_bytes(2, "big") for place in range(2560))


def windows(seed: int = 0) -> tuple[tiny_gpt.Windows, tiny_gpt.Windows]:
    return tiny_gpt.split_windows(TEXT, seq_len=16, held_out=8, seed=seed)


def place(window: tuple[torch.Tensor, torch.Tensor]) -> int:
    high, low = window[0][:2].tolist()
    return 2 * (256 * high + low)


def test_every_window_is_trained_on_once_an_epoch_or_held_out_and_its_targets_follow() -> None:
    train, test = windows()
    inputs, targets = train[5]
    start = place((inputs, targets))
    assert bytes(inputs.tolist()) == TEXT[start : start + 16]
    assert bytes(targets.tolist()) == TEXT[start + 1 : start + 17]
    trained = [place(train[g]) for g in range(len(train))]
    held_out = [place(test[g]) for g in range(len(test))]
    assert 1 <= len(held_out) <= 8
    assert sorted([*trained, *held_out]) == list(range(0, len(TEXT) - 16, 16))
    assert trained != sorted(trained)
    with pytest.raises(ValueError, match="100 bytes of text are fewer than 10 windows of 16"):
        tiny_gpt.split_windows(TEXT[:100], seq_len=16, held_out=8, seed=0)


def test_each_epoch_and_seed_has_an_order_of_its_own_that_needs_no_window_before() -> None:
    train, fresh, other = windows()[0], windows()[0], windows(seed=9)[0]
    walked = [train[g] for g in range(2 * len(train) + 3)]
    assert torch.equal(walked[-1][0], fresh[2 * len(train) + 2][0])
    whole = len(train)
    orders = {tuple(map(place, walked[at : at + whole])) for at in (0, whole)}
    assert len({*orders, tuple(place(other[g]) for g in range(whole))}) == 3


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


def divided(folder: Path, *, ranks: int, accumulation: int, exact: bool, dropout: float) -> None:
    (folder / STATE).write_text(json.dumps({"accumulation": 1}))
    saved = Checkpoint(path=folder, step=3, world_size=4, attempt=1, saved_at=0.0, settings={})
    accelerator = SimpleNamespace(num_processes=ranks, is_main_process=True)
    args = argparse.Namespace(accumulation=accumulation, exact=exact, dropout=dropout)
    check_division(saved, accelerator, args)


def test_other_masks_of_dropout_are_said_and_the_same_bits_need_the_same_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks, accumulation, dropout, is_said in [
        *((4, 1, 0.1, False), (2, 2, 0.0, False), (2, 2, 0.1, True), (4, 2, 0.1, True)),
    ]:
        divided(tmp_path, ranks=ranks, accumulation=accumulation, exact=False, dropout=dropout)
        assert ("dropout draws other masks" in capsys.readouterr().out) is is_said
    divided(tmp_path, ranks=4, accumulation=1, exact=True, dropout=0.0)
    with pytest.raises(SystemExit, match="accumulation was 1 and is 2, but --exact needs"):
        divided(tmp_path, ranks=4, accumulation=2, exact=True, dropout=0.0)
