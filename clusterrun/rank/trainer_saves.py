"""Record what transformers' Trainer saves, and continue from it in a later attempt of the run.

By itself, it begins anew if the script calls train() without an argument. Nothing is written to its
directory, and a training makes no collective call: rank 0 records each checkpoint in the run
directory. Before a training, all ranks look whether they have saved their part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterrun.errors import ClusterrunError
from clusterrun.rank.apart import at
from clusterrun.rank.collectives import broadcast, gathered, joined_world
from clusterrun.rank.emit import emit, say, say_once
from clusterrun.rank.save_together import has_begun, own_attempt, refusal
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import (
    ANY,
    TRAINERS,
    UNREAD,
    Checkpoint,
    IncompleteError,
    Sums,
)

_STATE, _ARGUMENTS = "trainer_state.json", "training_args.bin"
_RANDOM = "rng_state_{}.pth"  # a zip archive that each rank of several writes last
_trainings: dict[str, Mapping[str, int] | None] = {}  # settings by directory; None if several


def continuing(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Trainer.train` with another default: this run's newest complete checkpoint."""

    @functools.wraps(train)
    def continued(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        if trial is None:  # else it searches hyperparameters
            resume_from_checkpoint = _begin(self, resume_from_checkpoint)
        return train(self, resume_from_checkpoint, *args, **kwargs)

    return continued


def _begin(trainer: Any, asked: Any) -> Any:
    """Return what to resume from: what the script says, else this run's newest checkpoint."""
    marks: Any = sys.modules.get("clusterrun.hf")
    callbacks = trainer.callback_handler.callbacks
    if marks and any(isinstance(each, marks.CheckpointCallback) for each in callbacks):
        return asked
    args, folder = trainer.args, os.path.abspath(trainer.args.output_dir)
    if folder in _trainings:  # such as another fold: its checkpoints have the names of the first's
        forget(args, -1)
        _trainings[folder] = None
        return asked
    with contextlib.suppress(ClusterrunError):  # this rank has joined no world
        here, world_size = joined_world()
        settings = _trainings[folder] = batch_settings(args, world_size)
        if own_attempt() > 1:
            if asked is None:
                return _newest(folder, here, settings, args.max_steps)
            if here == 0:
                say(f"the script decides where the Trainer begins: resume_from_checkpoint={asked}")
    return asked


def forget(args: Any, step: int) -> None:
    """Forget what was saved after a step: a training begins there and writes it again."""
    folder = os.path.abspath(args.output_dir)
    if _trainings.get(folder) is not None and joined_world()[0] == 0:
        for later, record in _records(folder):
            if later > step:
                shutil.rmtree(record, ignore_errors=True)


def saved(args: Any, state: Any) -> None:
    """Record a checkpoint that this rank, the first, has saved; others may still write theirs."""
    step, folder = state.global_step, os.path.abspath(args.output_dir)
    settings, path = _trainings.get(folder), Path(folder, f"checkpoint-{step}")
    if settings is None or args.save_only_model or state.is_hyper_param_search:
        return
    here, world_size = joined_world()
    if here or has_begun(os.environ["CLUSTERRUN_RUN_DIR"], own_attempt() + 1):
        return
    about: dict[str, Any] = {"step": step, "world_size": world_size, "settings": settings}
    try:
        names = checkpoint_files.of_first_rank(checkpoint_files.file_names(path))
        # The state's checksum shows which training this is.
        known = {_STATE: checkpoint_files.checksum(path / _STATE)}
        files = {name: ((path / name).stat().st_size, known.get(name, UNREAD)) for name in names}
        (record := _record(folder, step)).mkdir(parents=True, exist_ok=True)
        checkpoint_files.mark(
            Checkpoint(path=path, attempt=own_attempt(), **about), files, record=record
        )
    except OSError as error:
        say_once(f"what the Trainer saved can't be recorded, so no attempt continues it: {error}")
        return
    emit("checkpoint", path=str(path), step=step)


def _record(folder: str, step: int) -> Path:
    directory = Path(os.environ["CLUSTERRUN_CHECKPOINT_DIR"])
    return checkpoint_files.trainer_record(directory, folder, step)


def _records(folder: str) -> list[tuple[int, Path]]:
    listed = checkpoint_files.listed(_record(folder, 0).parent, ANY)
    return [(step, record) for step, record in listed if record == _record(folder, step)]


def _newest(folder: str, here: int, settings: Mapping[str, int], last: int) -> str | None:
    """Return the newest checkpoint that all ranks can use, before step `last` if that is not 0.

    In the middle of an epoch, transformers would train one step more than `max_steps`.
    """
    tell = say if here == 0 else str
    offered: list[tuple[Checkpoint, Sums]] = []
    for _, record in _records(folder)[:8] if here == 0 else ():  # there may be thousands
        try:
            offered.append(checkpoint_files.read_marker(record))
        except IncompleteError as fault:
            say(checkpoint_files.passed_over(record, str(fault)))
    offered = broadcast(offered)
    for found, files in offered:
        path = Path(folder, found.path.name)
        if 0 < last <= found.step:
            continue
        if problem := next(filter(None, gathered(_problem(path, here, found, files))), ""):
            tell(checkpoint_files.passed_over(path, problem))
        elif words := found.difference(None, settings):
            hint = "keep batch size x accumulation x ranks, or resume with --from scratch"
            raise refusal(f"can't continue from {path}: {words}", hint)
        else:
            tell(
                f"the Trainer continues from {path} (to begin anew: "
                "--set launch.trainer_resume=false)"
            )
            return str(path)
    if offered:
        tell("the Trainer begins anew: no checkpoint of this run can be used")
    elif here == 0:
        other, _ = checkpoint_files.newest(_record(folder, 0).parent, TRAINERS, contents=False)
        if other:
            say(f"the Trainer begins anew: it saves to {folder}, but this run saved {other.path}")
    return None


def _problem(path: Path, here: int, found: Checkpoint, files: Sums) -> str:
    """Return why this rank can't use a checkpoint; one rank of each node looks for all."""
    own, first = path / _RANDOM.format(here), _RANDOM.format(0)
    own_words = () if here == 0 else (first, _STATE, _ARGUMENTS)  # may differ if nodes share none
    needed = {name: files[name] for name in files if name not in own_words}
    try:
        if 0 < here < found.world_size and not zipfile.is_zipfile(own):
            raise IncompleteError(f"{own.name} is missing, or was not written to its end")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            checkpoint_files.check(path, needed)
            if not (path / _STATE).is_file():
                raise IncompleteError(f"{_STATE} is missing")
    except IncompleteError as fault:
        return at(os.environ.get("CLUSTERRUN_NODE", ""), str(fault))
    return ""


def batch_settings(args: Any, world_size: int) -> dict[str, int]:
    """Return the settings of a Trainer that a resumed run must share.

    Ranks share their samples by tensor, context or sequence parallelism.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    state = accelerate.AcceleratorState._shared_state if accelerate else {}
    ranks = world_size // getattr(state.get("parallelism_config"), "non_data_parallel_size", 1)
    return {"effective_batch": args.train_batch_size * args.gradient_accumulation_steps * ranks}
