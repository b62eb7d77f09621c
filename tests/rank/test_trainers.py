"""Trainers report their steps in scripts that do not; here transformers and Lightning are stubs."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterrun import runtime
from clusterrun.rank import trainers

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


def told(spool: Path) -> list[tuple[Any, ...]]:
    path = spool / "rank_0.events"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    return [(e["type"], e["step"], e.get("total"), e.get("metrics")) for e in events]


def state(step: int, total: int = 9) -> SimpleNamespace:
    history = [{"loss": 2.5, "grad_norm": 1.0}, {"eval_loss": 3.0}]
    return SimpleNamespace(global_step=step, max_steps=total, log_history=history)


def test_each_trainer_gets_a_callback_that_reports_its_steps(
    spool: Path, transformers: ModuleType
) -> None:
    assert len(transformers.DEFAULT_CALLBACKS) == 2
    callback, control = transformers.DEFAULT_CALLBACKS[1], SimpleNamespace()
    callback.on_prediction_step(None, state(0), control)  # an evaluation before the training
    callback.on_train_begin(None, state(4), control, model=None)
    callback.on_step_end(None, state(5), control, model=None)
    callback.on_prediction_step(None, state(5), control, model=None)
    callback.on_train_end(None, state(5), control)  # it stopped early
    callback.on_step_end(None, state(9), control)
    callback.on_prediction_step(None, state(9), control)
    callback.on_train_end(None, state(9), control)
    loss = {"loss": 2.5}
    assert told(spool) == [
        ("resumed", 4, None, None),
        ("step", 5, 9, loss),
        ("step", 5, 9, loss),
        ("step", 5, 5, loss),
        ("step", 9, 9, loss),
    ]
    assert vars(control) == {}  # it asks the Trainer for nothing
    assert type(pickle.loads(pickle.dumps(callback))).__name__ == "StepCallback"


def test_steps_that_the_script_reports_itself_replace_the_trainers(
    spool: Path, transformers: ModuleType
) -> None:
    callback = transformers.DEFAULT_CALLBACKS[1]
    callback.on_step_end(None, state(1), None)
    runtime.step(100, 900, loss=1.0)
    callback.on_step_end(None, state(2), None)
    assert [step for _, step, *_ in told(spool)] == [1, 100]


def test_only_rank_0_reports(
    spool: Path, transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    callback = transformers.DEFAULT_CALLBACKS[1]
    callback.on_train_begin(None, state(0), None)
    callback.on_step_end(None, state(1), None)
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_trainer_gets_one_too(
    spool: Path, monkeypatch: pytest.MonkeyPatch, package: str
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
    assert told(spool) == [
        ("resumed", 0, None, None),
        ("step", 1, 9, {}),
        ("step", 1, 9, {}),
        ("resumed", 1, None, None),
        ("step", 1, None, {}),
        ("step", 1, 1, {}),
    ]
    assert type(pickle.loads(pickle.dumps(callback))).__name__ == "StepCallback"


@pytest.mark.parametrize("name", list(trainers.PATCHES))
def test_a_version_that_has_changed_is_left_as_it_is(name: str) -> None:
    module = ModuleType(name)
    before = dict(vars(module))
    trainers.PATCHES[name](module)
    assert vars(module) == before
