"""Save Hugging Face's Trainer when the job asks, and resume it from complete checkpoints.

    trainer = Trainer(..., callbacks=[CheckpointCallback()])
    trainer.train(resume_from_checkpoint=resume_path(trainer.args.output_dir))

Needs transformers; no other module imports this one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from clusterrun import runtime
from clusterrun.errors import ClusterrunError
from clusterrun.rank.collectives import (
    APART,
    Sharing,
    agreed_problem,
    broadcast,
    gathered,
    joined_world,
)
from clusterrun.rank.emit import say
from clusterrun.rank.save_together import (
    is_superseded,
    mark,
    overridden,
    say_unsaved,
    settled_together,
)
from clusterrun.rank.trainers import batch_settings
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import MARKER, IncompleteError


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Save when clusterrun asks, mark checkpoints as complete, and stop when the job must end.

    The callback refuses to resume with a different effective batch: the training would differ.
    `override=["effective_batch"]` accepts the change, and later checkpoints record it.
    """

    def __init__(self, *, override: Collection[str] = ()) -> None:
        self._override = override
        self._overrides: Sequence[Mapping[str, Any]] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that prevent a resume, and a resume with a different effective batch."""
        del control
        if args.save_only_model:
            text = "save_only_model=True saves no optimizer state, so the run could not resume"
            raise ClusterrunError(f"{text}: turn it off, or remove CheckpointCallback")
        rank, world_size = joined_world()
        limit = args.save_total_limit
        if rank == 0 and (limit == 1 or (limit == 2 and args.metric_for_best_model)):
            text = "the Trainer may remove the last complete checkpoint before it has saved another"
            say(f"save_total_limit={limit}: {text}; set it to 3 or more")
        if os.environ.get(APART) and not args.save_on_each_node:
            args.save_on_each_node = True  # else other nodes than the first never remove old ones
            if rank == 0:
                say("sets save_on_each_node=True: the nodes share no directory")
        saved = None  # no checkpoint at step 0, and no marker if another program saved it
        with contextlib.suppress(IncompleteError):
            if rank == 0:
                saved, _ = checkpoint_files.read_marker(_checkpoint_path(args, state))
        if saved := broadcast(saved):
            _refuse_batch_of_checkpoint(args, state, kwargs.get("train_dataloader"))
            settings = batch_settings(args, world_size)
            if difference := saved.difference(None, settings, override=self._override):
                accept = 'accept it with CheckpointCallback(override=["effective_batch"])'
                ways = f"keep batch size x accumulation x ranks, or {accept}"
                raise ClusterrunError(f"can't resume from {saved.path}: {difference} ({ways})")
            self._overrides = overridden(saved, settings, self._override)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save if the job asks; the callback that each Trainer has in a run reports the step."""
        if runtime.should_checkpoint():
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint once all ranks have written their files; stop if asked to."""
        path = _checkpoint_path(args, state)
        rank, world_size = joined_world()
        gathered(None)  # waits until all ranks have written
        sharing = Sharing.of_this_rank()
        parts, problem = settled_together(path, sharing)
        settings = batch_settings(args, world_size)
        publish = partial(mark, path, state.global_step, settings, parts, self._overrides, sharing)
        if not is_superseded():
            problem = problem or agreed_problem(publish if sharing.is_first else None)
            if problem and sharing.nodes and sharing.is_first:
                (path / MARKER).unlink(missing_ok=True)  # complete on all nodes, or on none
            if not problem:
                runtime.checkpoint(path, state.global_step)
            elif rank == 0:
                say_unsaved(state.global_step, f"cannot mark {path.name} as complete: {problem}")
        # Only after the save: the Trainer would store the flag, and stop again when it resumes.
        if runtime.should_stop():
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Skip the save and evaluation at the end of an interrupted epoch."""
        if runtime.should_stop():
            control.should_save = control.should_evaluate = False


def _checkpoint_path(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _refuse_batch_of_checkpoint(args: Any, state: Any, loader: Any) -> None:
    """Refuse a Trainer that uses the checkpoint's batch size instead of its argument.

    transformers 4 does so silently. With other accumulation steps, the effective batch changes.
    """
    own = args.train_batch_size
    used = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if used != own and used == state.train_batch_size and not args.auto_find_batch_size:
        text = f"this version of transformers resumes with the checkpoint's batch size, {used}"
        raise ClusterrunError(f"{text}, not {own}: use a newer version, or keep {used}")


def resume_path(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in `output_dir`; None if there is none."""
    found = runtime.Checkpoints(output_dir).newest()
    return str(found.path) if found else None
