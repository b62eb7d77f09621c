"""The learning rate counts optimizer steps, whatever the world; the last of them is saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strategies
import train_lm
from accelerate.utils import DistributedType
from torch import nn

from tests.examples.worlds import IN_A_RUN

pytestmark = pytest.mark.torch


def test_the_rate_rises_over_the_warm_up_and_falls_to_a_tenth() -> None:
    factors = [train_lm.schedule_factor(step, warmup=4, max_steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.55)
    assert factors[12] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)


@pytest.mark.parametrize(("warmup", "max_steps"), [(0, 1), (0, 5), (5, 5), (9, 5)])
def test_odd_lengths_give_a_rate_for_every_step(warmup: int, max_steps: int) -> None:
    for step in range(max_steps + 1):
        assert 0 < train_lm.schedule_factor(step, warmup=warmup, max_steps=max_steps) <= 1


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_deepspeed_gets_max_steps_back_after_accelerates_division(processes: int) -> None:
    optimizer, scheduler = stand_ins(processes, {"optimizer": {}, "scheduler": {}})
    assert type(optimizer).__name__ == "DummyOptim"
    assert optimizer.lr == 0.002
    assert scheduler.total_num_steps / processes == 100
    assert scheduler.warmup_num_steps == 10


def test_a_deepspeed_config_without_scheduler_leaves_the_rate_to_the_loop() -> None:
    assert stand_ins(2, {"optimizer": {}})[1] is None
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


@pytest.mark.parametrize(("steps", "is_refused"), [(2, True), (3, False)])
def test_a_last_step_that_was_not_saved_is_no_good_end(steps: int, is_refused: bool) -> None:
    """Else the run would have completed, and its result lie nowhere."""
    training = SimpleNamespace(
        args=SimpleNamespace(max_steps=steps, log_every=9, save_every=1),
        store=object(),
        meter=SimpleNamespace(reset=lambda: None, newest={}),
        steps=lambda batches, first: [(1, 0.1), (2, 0.1)],
        log=lambda step, lr: None,
        save=lambda step, state: False,
    )
    if not is_refused:
        assert train_lm.train_steps(training, [], 0, {})  # type: ignore[arg-type]
        return
    with pytest.raises(SystemExit, match="error: step 2, the last, was not saved"):
        train_lm.train_steps(training, [], 0, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_later_attempt_goes_on_whatever_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    for name, value in IN_A_RUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLUSTERRUN_ATTEMPT", str(attempt))
    monkeypatch.setenv("CLUSTERRUN_CHECKPOINT_DIR", str(tmp_path))
    args = train_lm.parse_arguments(["--max-steps", "9"])
    assert (args.output, args.resume) == ((tmp_path, True) if attempt > 1 else (None, False))
