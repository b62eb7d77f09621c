"""Report the steps of transformers' and Lightning's trainers, for scripts that do not.

In a run each trainer gets a callback that only reports: no saves, no collectives, nothing in
checkpoints. The script's own reports replace the callback's. `trainer_saves` continues trainings.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from clusterrun import runtime
from clusterrun.rank import trainer_saves
from clusterrun.rank.import_hooks import Patch


def _logged(state: Any) -> dict[str, Any]:
    """Return the newest loss and learning rate of transformers' Trainer."""
    newest: dict[str, Any] = next(
        (entry for entry in reversed(state.log_history) if "loss" in entry), {}
    )
    return {name: newest[name] for name in ("loss", "learning_rate") if name in newest}


def _begun(step: int, total: int | None) -> None:
    """Report the step from which a trainer starts; 0 is the beginning."""
    if runtime.rank() == 0:
        runtime.emit("resumed", step=int(step), total=total, is_trainer=True)


def _ended(step: int, total: int | None, **metrics: Any) -> None:
    """Report that the training has ended; if it stopped early, this step was the last."""
    if step not in (0, total):
        runtime.follow_trainer(step, step, **metrics)
    if runtime.rank() == 0:
        runtime.emit("alive", training=False)


def _watch_transformers(module: ModuleType) -> None:
    """Add the callback to the defaults of each Trainer, and have train() continue."""
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if isinstance(defaults, list) and hasattr(module, "TrainerCallback"):
        defaults.append(transformers_callback(module.__name__))
    trainer: Any = getattr(module, "Trainer", None)
    code = getattr(getattr(trainer, "train", None), "__code__", None)
    is_on = os.environ.get("CLUSTERRUN_TRAINER_RESUME") == "1"
    if is_on and code and code.co_varnames[1:2] == ("resume_from_checkpoint",):
        trainer.train = trainer_saves.continuing(trainer.train)


def transformers_callback(module: str) -> Any:
    """Return a callback for transformers' Trainers; it has no state, so one serves all."""
    base: Any = importlib.import_module(module).TrainerCallback

    class StepCallback(base):  # type: ignore[misc]  # transformers has no types here
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _begun(state.global_step, state.max_steps)
            trainer_saves.forget(args, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer_saves.saved(args, state)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            runtime.follow_trainer(state.global_step, state.max_steps, **_logged(state))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = (), **_: Any) -> None:
            # The last step was reported before its loss; an evaluation logs later, without one.
            if state.global_step == state.max_steps and "loss" in (logs or ()):
                self.on_step_end(args, state, control)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            runtime.alive()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _ended(state.global_step, state.max_steps, **_logged(state))

        def __reduce__(self) -> Any:
            return transformers_callback, (module,)  # a hyperparameter search pickles it

    return StepCallback()


def _watch_lightning(module: ModuleType) -> None:
    """Add the callback to those that Lightning loads from installed packages."""
    original = getattr(module, "_load_external_callbacks", None)
    if original is None:
        return
    package = module.__name__.removesuffix(f".{_CONNECTOR}")

    def load(*args: Any, **kwargs: Any) -> Any:
        return [*original(*args, **kwargs), lightning_callback(package)]

    module._load_external_callbacks = load  # type: ignore[attr-defined]


def lightning_callback(package: str) -> Any:
    """Return a callback for Lightning; `package` is the name that the script imports."""
    base: Any = importlib.import_module(package).Callback

    class StepCallback(base):  # type: ignore[misc]  # Lightning need not be installed
        _total: int | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._total = _total(trainer)
            _begun(trainer.global_step, self._total)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            runtime.follow_trainer(trainer.global_step, self._total)

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            runtime.alive()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _ended(trainer.global_step, self._total)

        def __reduce__(self) -> Any:
            return lightning_callback, (package,)  # ddp_spawn pickles it

    return StepCallback()


def _total(trainer: Any) -> int | None:
    """Return the number of steps that Lightning expects; None if unknown."""
    with contextlib.suppress(Exception):  # other versions may lack this property
        total = trainer.estimated_stepping_batches
        return int(total) if 0 < total < float("inf") else None
    return None


_CONNECTOR = "trainer.connectors.callback_connector"
PATCHES: Mapping[str, Patch] = {
    "transformers.trainer": _watch_transformers,
    f"lightning.pytorch.{_CONNECTOR}": _watch_lightning,
    f"pytorch_lightning.{_CONNECTOR}": _watch_lightning,
}
