"""Trainers report their steps in scripts that do not; here transformers and Lightning are stubs."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterrun import runtime
from clusterrun.node.watch import hangs
from clusterrun.rank import trainers
from tests.node.test_hangs import HangingRanks, TickingClock

ARGS = SimpleNamespace(output_dir="out")
ENVIRON = {"RANK": "0", "CLUSTERRUN_WORLD_SIZE": "2"}


class Clock:
    """Each step takes two seconds: none is held back."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 2
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture(name="spool")
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {**ENVIRON, "CLUSTERRUN_SPOOL": str(tmp_path)}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(runtime, "_steps", runtime._Steps())
    monkeypatch.setattr(runtime, "time", Clock())
    return tmp_path


@pytest.fixture(name="transformers")
def _transformers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Patch a stub of transformers.trainer as the import hook does."""
    name = "transformers.trainer"
    module = ModuleType(name)
    module.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    module.DEFAULT_CALLBACKS = [object]  # type: ignore[attr-defined]
    for known in ("transformers", name):
        monkeypatch.setitem(sys.modules, known, module)
    trainers.PATCHES[name](module)
    return module


def events(spool: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (spool / "rank_0.events").read_text().splitlines()]


def reported(spool: Path) -> list[tuple[Any, ...]]:
    known = ("type", "step", "total", "metrics", "training")
    return [tuple(event[name] for name in known if name in event) for event in events(spool)]


@pytest.fixture(name="is_hang")
def _is_hang(spool: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Feed the events to the head's watch, 50 s after each sign of life, and nothing at the end.

    A step takes a second, so the limit is 60 s.
    """
    clock = TickingClock()
    monkeypatch.setattr(hangs, "time", clock)
    monkeypatch.setattr(hangs, "AGAIN_S", 0.01)

    async def scene() -> bool:
        ranks = HangingRanks(clock, {"places": []})
        for event in events(spool):
            ranks.watch.heard(event)
            await ranks.idle(50 if event["type"] == "alive" else 1)
            assert not [*ranks.watch.tasks], event
        await ranks.idle(1000)
        await ranks.settle()
        return bool(ranks.failures)

    return lambda: asyncio.run(scene())


def state(step: int, total: int = 9) -> SimpleNamespace:
    history = [{"loss": 2.5, "grad_norm": 1.0}, {"eval_loss": 3.0}]
    return SimpleNamespace(global_step=step, max_steps=total, log_history=history)


def test_each_trainer_gets_a_callback_that_reports_its_steps(
    spool: Path, transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(transformers.DEFAULT_CALLBACKS) == 2
    callback, control = transformers.DEFAULT_CALLBACKS[1], SimpleNamespace()
    callback.on_prediction_step(None, state(0), control)  # an evaluation before the training
    callback.on_train_begin(ARGS, state(4), control, model=None)
    callback.on_step_end(None, state(5), control, model=None)
    callback.on_prediction_step(None, state(5), control, model=None)
    callback.on_train_end(None, state(5), control)  # it stopped early
    callback.on_step_end(None, state(9), control)
    callback.on_prediction_step(None, state(9), control)
    callback.on_train_end(None, state(9), control)
    loss = {"loss": 2.5}
    assert reported(spool) == [
        ("alive",),
        ("resumed", 4, 9),
        ("step", 5, 9, loss),
        ("alive",),
        ("step", 5, 5, loss),
        ("alive", False),
        ("step", 9, 9, loss),
        ("alive",),
        ("alive", False),
    ]
    assert vars(control) == {}  # it asks the Trainer for nothing
    monkeypatch.setenv("RANK", "1")
    callback.on_train_begin(ARGS, state(0), None)
    callback.on_step_end(None, state(1), None)
    assert [path.name for path in spool.iterdir()] == ["rank_0.events"], "only rank 0 reports"
    assert type(pickle.loads(pickle.dumps(callback))).__name__ == "TrainerSteps"


def test_the_last_report_has_the_loss_of_the_last_step(
    spool: Path, transformers: ModuleType
) -> None:
    """A Trainer logs after the end of the step."""
    callback, last = transformers.DEFAULT_CALLBACKS[1], state(9)
    callback.on_step_end(None, last, None)
    last.log_history.append({"loss": 0.5})
    for logs in ({"loss": 0.5}, {"eval_loss": 0.7}):  # an evaluation is no step
        callback.on_log(None, last, None, logs=logs)
    assert reported(spool) == [("step", 9, 9, {"loss": loss}) for loss in (2.5, 0.5)]


def test_steps_that_the_script_reports_itself_replace_the_trainers(
    spool: Path, transformers: ModuleType
) -> None:
    callback = transformers.DEFAULT_CALLBACKS[1]
    callback.on_step_end(None, state(1), None)
    runtime.step(100, 900, loss=1.0)
    callback.on_step_end(None, state(2), None)
    assert reported(spool) == [
        ("step", 1, 9, {"loss": 2.5}),
        ("step", 100, 900, {"loss": 1.0}),
        ("alive",),
    ]


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("ends_at", [None, 5, 9])
def test_an_evaluation_or_an_export_is_not_a_hang(
    spool: Path,
    transformers: ModuleType,
    is_hang: Callable[[], bool],
    has_own: bool,
    ends_at: int | None,
) -> None:
    callback = transformers.DEFAULT_CALLBACKS[1]
    callback.on_train_begin(ARGS, state(0), None)
    callback.on_step_end(None, state(ends_at or 5), None)
    if has_own:
        runtime.step(ends_at or 5, 9)
    for _ in range(3):
        callback.on_prediction_step(None, state(5), None)
    if ends_at is not None:
        callback.on_train_end(None, state(ends_at), None)
    callback.on_prediction_step(None, state(ends_at or 5), None)
    assert is_hang() == (ends_at is None)
    if ends_at and not has_own:
        callback.on_step_end(None, state(1), None)
        assert is_hang(), "a second training is watched again"


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_trainer_gets_one_too(
    spool: Path, monkeypatch: pytest.MonkeyPatch, is_hang: Callable[[], bool], package: str
) -> None:
    stub = ModuleType(package)
    stub.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    for name in {package, package.partition(".")[0]}:
        monkeypatch.setitem(sys.modules, name, stub)
    name = f"{package}.trainer.connectors.callback_connector"
    module = ModuleType(name)
    module._load_external_callbacks = lambda group: [group]  # type: ignore[attr-defined]
    trainers.PATCHES[name](module)
    own, callback = module._load_external_callbacks("factory")
    assert own == "factory"
    trainer = SimpleNamespace(global_step=0, estimated_stepping_batches=9)
    callback.on_validation_batch_end(trainer, None)  # the sanity check before the training
    callback.on_train_start(trainer, None)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_validation_batch_end(trainer, None)
    trainer.estimated_stepping_batches = float("inf")
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    callback.on_validation_batch_end(trainer, None)
    assert reported(spool) == [
        ("alive",),
        ("resumed", 0, 9),
        ("step", 1, 9, {}),
        ("alive",),
        ("resumed", 1, None),
        ("step", 1, None, {}),
        ("step", 1, 1, {}),
        ("alive", False),
        ("alive",),
    ]
    assert not is_hang()
    assert type(pickle.loads(pickle.dumps(callback))).__name__ == "LightningSteps"


@pytest.mark.parametrize("name", list(trainers.PATCHES))
def test_a_version_that_has_changed_is_left_as_it_is(name: str) -> None:
    module = ModuleType(name)
    before = dict(vars(module))
    trainers.PATCHES[name](module)
    assert vars(module) == before
