"""Report the steps of transformers' and Lightning's trainers, for scripts that do not.

In a run each trainer gets a callback that only reports: no saves, no collectives, nothing in
checkpoints. The script's own reports replace the callback's.

What transformers' Trainer saves is recorded, and a later attempt of the run continues from it. By
itself, it begins anew if the script calls train() without an argument. Nothing is written to its
directory, and a training makes no collective call: rank 0 records each checkpoint in the run
directory. Before a training, all ranks look whether they have saved their part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterrun import runtime
from clusterrun.errors import ClusterrunError
from clusterrun.rank.collectives import broadcast, gathered, joined_world, with_node
from clusterrun.rank.emit import emit, say, say_once
from clusterrun.rank.import_hooks import Patch
from clusterrun.rank.save_together import has_successor, own_attempt, refusal
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import TRAINERS, UNREAD, Checkpoint, IncompleteError, Sums

_STATE, _ARGUMENTS = "trainer_state.json", "training_args.bin"
_RANDOM = "rng_state_{}.pth"  # a zip archive that each rank of several writes last
MOST_RECORDS = 8  # that are tried: there may be thousands
_settings_by_folder: dict[str, Mapping[str, int] | None] = {}  # None: several trainings


def _newest_metrics(state: Any) -> dict[str, Any]:
    """Return the newest loss and learning rate of transformers' Trainer."""
    with_loss = (entry for entry in reversed(state.log_history) if "loss" in entry)
    newest: dict[str, Any] = next(with_loss, {})
    return {name: newest[name] for name in ("loss", "learning_rate") if name in newest}


def _report_begin(step: int, total: int | None) -> None:
    """Report the step from which a trainer starts; 0 is the beginning."""
    if runtime.rank() == 0:
        runtime.emit("resumed", step=int(step), total=total, is_trainer=True)


def _report_end(step: int, total: int | None, **metrics: Any) -> None:
    """Report that the training has ended; if it stopped early, this step was the last."""
    if step not in (0, total):  # else no step was made, or the last one is reported already
        runtime.follow_trainer(step, total=step, **metrics)
    if runtime.rank() == 0:
        runtime.emit("alive", training=False)  # ends the watch for hangs


def _watch_transformers(module: ModuleType) -> None:
    """Add the callback to each Trainer; train() continues from this run's newest checkpoint."""
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if isinstance(defaults, list) and hasattr(module, "TrainerCallback"):
        defaults.append(transformers_callback(module.__name__))
    trainer: Any = getattr(module, "Trainer", None)
    code = getattr(getattr(trainer, "train", None), "__code__", None)
    is_on = os.environ.get("CLUSTERRUN_TRAINER_RESUME") == "1"
    # Leave alone a version of transformers whose train() has another first parameter.
    if not is_on or code is None or code.co_varnames[1:2] != ("resume_from_checkpoint",):
        return
    train = trainer.train

    @functools.wraps(train)
    def resume(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        if trial is None:  # else it searches hyperparameters
            resume_from_checkpoint = _choose_start(self, resume_from_checkpoint)
        return train(self, resume_from_checkpoint, *args, **kwargs)

    trainer.train = resume


def transformers_callback(module: str) -> Any:
    """Return a callback for transformers' Trainers; it has no state, so one serves all."""
    base: Any = importlib.import_module(module).TrainerCallback

    class TrainerSteps(base):  # type: ignore[misc]  # transformers has no types here
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _report_begin(state.global_step, state.max_steps)
            forget_after(args, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record_saved(args, state)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            runtime.follow_trainer(state.global_step, state.max_steps, **_newest_metrics(state))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = (), **_: Any) -> None:
            # The last step was reported before its loss; an evaluation logs later, without one.
            if state.global_step == state.max_steps and "loss" in (logs or ()):
                self.on_step_end(args, state, control)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            runtime.alive()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _report_end(state.global_step, state.max_steps, **_newest_metrics(state))

        def __reduce__(self) -> Any:
            return transformers_callback, (module,)  # a hyperparameter search pickles it

    return TrainerSteps()


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

    class LightningSteps(base):  # type: ignore[misc]  # Lightning need not be installed
        _total: int | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._total = _total(trainer)
            _report_begin(trainer.global_step, self._total)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            runtime.follow_trainer(trainer.global_step, self._total)

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            runtime.alive()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _report_end(trainer.global_step, self._total)

        def __reduce__(self) -> Any:
            return lightning_callback, (package,)  # ddp_spawn pickles it

    return LightningSteps()


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


def _choose_start(trainer: Any, asked: Any) -> Any:
    """Return what to resume from: what the script asks for, else this run's newest checkpoint."""
    hf: Any = sys.modules.get("clusterrun.hf")
    callbacks = trainer.callback_handler.callbacks
    if hf and any(isinstance(each, hf.CheckpointCallback) for each in callbacks):
        return asked  # it marks its own, from which hf.resume_path resumes
    args, folder = trainer.args, os.path.abspath(trainer.args.output_dir)
    if folder in _settings_by_folder:  # such as another fold: its checkpoints have equal names
        forget_after(args, -1)  # remove all records
        _settings_by_folder[folder] = None
        return asked
    with contextlib.suppress(ClusterrunError):  # this rank has joined no world
        own_rank, world_size = joined_world()
        settings = _settings_by_folder[folder] = batch_settings(args, world_size)
        if own_attempt() > 1:
            if asked is None:
                return _newest(folder, own_rank, settings, args.max_steps)
            if own_rank == 0:
                say(f"the script decides where the Trainer begins: resume_from_checkpoint={asked}")
    return asked


def forget_after(args: Any, step: int) -> None:
    """Remove the records of checkpoints after `step`, since a training begins there anew."""
    folder = os.path.abspath(args.output_dir)
    if _settings_by_folder.get(folder) is not None and joined_world()[0] == 0:
        for later, record in _records(folder):
            if later > step:
                shutil.rmtree(record, ignore_errors=True)


def record_saved(args: Any, state: Any) -> None:
    """Record, on rank 0, a checkpoint that it has saved; other ranks may still write theirs."""
    step, folder = state.global_step, os.path.abspath(args.output_dir)
    settings, path = _settings_by_folder.get(folder), Path(folder, f"checkpoint-{step}")
    if settings is None or args.save_only_model or state.is_hyper_param_search:
        return
    own_rank, world_size = joined_world()
    if own_rank != 0 or has_successor():
        return
    about: dict[str, Any] = {"step": step, "world_size": world_size, "settings": settings}
    try:
        names = checkpoint_files.of_first_rank(checkpoint_files.file_names(path))
        # The state's checksum shows which training this is.
        known = {_STATE: checkpoint_files.checksum(path / _STATE)}
        files = {name: ((path / name).stat().st_size, known.get(name, UNREAD)) for name in names}
        (record := _record(folder, step)).mkdir(parents=True, exist_ok=True)
        found = Checkpoint(path=path, attempt=own_attempt(), **about)
        checkpoint_files.mark(found, files, record=record)
    except OSError as error:
        say_once(f"the Trainer's checkpoint can't be recorded, so no attempt can use it: {error}")
        return
    emit("checkpoint", path=str(path), step=step)


def _record(folder: str, step: int) -> Path:
    directory = Path(os.environ["CLUSTERRUN_CHECKPOINT_DIR"])
    return checkpoint_files.trainer_record(directory, folder, step)


def _records(folder: str) -> list[tuple[int, Path]]:
    listed = checkpoint_files.listed(_record(folder, 0).parent, checkpoint_files.ANY)
    return [(step, record) for step, record in listed if record == _record(folder, step)]


def _newest(folder: str, own_rank: int, settings: Mapping[str, int], max_steps: int) -> str | None:
    """Return the newest checkpoint that all ranks can use, before `max_steps` if that is positive.

    If it resumed at `max_steps` within an epoch, transformers would train one step more.
    """

    def tell(text: str) -> None:
        if own_rank == 0:
            say(text)

    offered = broadcast(_recorded(folder) if own_rank == 0 else [])
    for found, files in offered:
        path = Path(folder, found.path.name)
        if 0 < max_steps <= found.step:
            continue
        if problem := next(filter(None, gathered(_problem(path, own_rank, found, files))), ""):
            tell(checkpoint_files.passed_over(path, problem))
        elif difference := found.difference(None, settings):
            hint = "keep batch size x accumulation x ranks, or resume with --from scratch"
            raise refusal(f"can't continue from {path}: {difference}", hint)
        else:
            over = "to start over: --set launch.trainer_resume=false"
            tell(f"the Trainer continues from {path} ({over})")
            return str(path)
    if offered:
        tell("the Trainer starts over: no checkpoint of this run can be used")
    elif own_rank == 0:
        other, _ = checkpoint_files.newest(_record(folder, 0).parent, TRAINERS, contents=False)
        if other:
            say(f"the Trainer starts over: it saves to {folder}, but this run saved {other.path}")
    return None


def _recorded(folder: str) -> list[tuple[Checkpoint, Sums]]:
    """Return the complete checkpoints among the newest that this run has recorded."""
    found = []
    for _, record in _records(folder)[:MOST_RECORDS]:
        try:
            found.append(checkpoint_files.read_marker(record))
        except IncompleteError as fault:
            say(checkpoint_files.passed_over(record, str(fault)))
    return found


def _problem(path: Path, own_rank: int, found: Checkpoint, files: Sums) -> str:
    """Return why this rank can't use a checkpoint; one rank of each node checks recorded files."""
    own_random, first_random = path / _RANDOM.format(own_rank), _RANDOM.format(0)
    differing = () if own_rank == 0 else (first_random, _STATE, _ARGUMENTS)  # on nodes apart
    needed = {name: files[name] for name in files if name not in differing}
    try:
        if 0 < own_rank < found.world_size and not zipfile.is_zipfile(own_random):
            raise IncompleteError(f"{own_random.name} is missing or incomplete")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            checkpoint_files.check(path, needed)
            if not (path / _STATE).is_file():
                raise IncompleteError(f"{_STATE} is missing")
    except IncompleteError as fault:
        return with_node(os.environ.get("CLUSTERRUN_NODE", ""), str(fault))
    return ""


def batch_settings(args: Any, world_size: int) -> dict[str, int]:
    """Return the settings of a Trainer that a resumed run must share."""
    accelerate: Any = sys.modules.get("accelerate.state")
    state = accelerate.AcceleratorState._shared_state if accelerate else {}
    # Ranks of one tensor, context or sequence parallel group train on the same samples.
    ranks = world_size // getattr(state.get("parallelism_config"), "non_data_parallel_size", 1)
    return {"effective_batch": args.train_batch_size * args.gradient_accumulation_steps * ranks}
