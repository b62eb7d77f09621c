"""Report the steps of transformers' Trainer and of Lightning's, in scripts that do not.

In a run each trainer gets a callback that reports and does nothing else: no saves, no collectives,
nothing in checkpoints. The script's own reports replace its.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from clusterrun import runtime
from clusterrun.rank.import_hooks import Patch


def logged(state: Any) -> dict[str, Any]:
    """Return the newest loss and learning rate of transformers' Trainer."""
    newest: dict[str, Any] = next(
        (entry for entry in reversed(state.log_history) if "loss" in entry), {}
    )
    return {name: newest[name] for name in ("loss", "learning_rate") if name in newest}


def _begun(step: int) -> None:
    """Report from which step a trainer goes on; 0 is the beginning."""
    if runtime.rank() == 0:
        runtime.emit("resumed", step=int(step))


def _watch_transformers(module: ModuleType) -> None:
    """Add the callback to those that each Trainer has."""
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if isinstance(defaults, list) and hasattr(module, "TrainerCallback"):
        defaults.append(transformers_callback(module.__name__))


def transformers_callback(module: str) -> Any:
    """Make a callback for transformers' Trainers; it keeps nothing, so one is enough for all."""
    base: Any = importlib.import_module(module).TrainerCallback

    class StepCallback(base):  # type: ignore[misc]  # transformers has no types here
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _begun(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            runtime.follow_trainer(state.global_step, state.max_steps, **logged(state))

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if 0 < state.global_step < state.max_steps:  # a long evaluation is no hang
                runtime.follow_trainer(state.global_step, state.max_steps, **logged(state))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != state.max_steps:  # it stopped early: no hangs after it
                runtime.follow_trainer(state.global_step, state.global_step, **logged(state))

        def __reduce__(self) -> Any:
            return transformers_callback, (module,)  # a search of hyperparameters pickles it

    return StepCallback()


def _watch_lightning(module: ModuleType) -> None:
    """Add the callback to those that Lightning takes from installed packages."""
    original = getattr(module, "_load_external_callbacks", None)
    if original is None:
        return
    package = module.__name__.removesuffix(f".{_CONNECTOR}")

    def load(*args: Any, **kwargs: Any) -> Any:
        return [*original(*args, **kwargs), lightning_callback(package)]

    module._load_external_callbacks = load  # type: ignore[attr-defined]


def lightning_callback(package: str) -> Any:
    """Make a callback for Lightning, by the name under which the script imports it."""
    base: Any = importlib.import_module(package).Callback

    class StepCallback(base):  # type: ignore[misc]  # Lightning need not be installed
        _total: int | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._total = _total(trainer)
            _begun(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            runtime.follow_trainer(trainer.global_step, self._total)

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if 0 < trainer.global_step != self._total:  # a long validation is no hang
                runtime.follow_trainer(trainer.global_step, self._total)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step != self._total:  # it stopped early
                runtime.follow_trainer(trainer.global_step, trainer.global_step)

        def __reduce__(self) -> Any:
            return lightning_callback, (package,)  # ddp_spawn pickles it

    return StepCallback()


def _total(trainer: Any) -> int | None:
    """Return how many steps Lightning expects; None if it can't know."""
    with contextlib.suppress(Exception):  # another version's trainer may have no such property
        total = trainer.estimated_stepping_batches
        return int(total) if 0 < total < float("inf") else None
    return None


_CONNECTOR = "trainer.connectors.callback_connector"
PATCHES: Mapping[str, Patch] = {
    "transformers.trainer": _watch_transformers,
    f"lightning.pytorch.{_CONNECTOR}": _watch_lightning,
    f"pytorch_lightning.{_CONNECTOR}": _watch_lightning,
}
