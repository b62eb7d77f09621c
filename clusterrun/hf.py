"""Save Hugging Face's Trainer when the job asks, and resume it from complete checkpoints.

    trainer = Trainer(..., callbacks=[CheckpointCallback()])
    trainer.train(resume_from_checkpoint=resume_path(trainer.args.output_dir))

Needs transformers; no other module imports this one.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from clusterrun import runtime
from clusterrun.errors import ClusterrunError
from clusterrun.rank.emit import say
from clusterrun.rank.save_together import (
    agreed_problem,
    gathered,
    is_superseded,
    joined_world,
    mark,
    say_unsaved,
    settled_together,
)
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import IncompleteError


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Save when the job asks, mark checkpoints as complete, and stop when the job must end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse settings that can't be resumed; report what changed since the checkpoint."""
        del control
        if args.save_only_model:
            raise ClusterrunError(
                "save_only_model=True leaves optimizer, schedule and random numbers out of the "
                "checkpoints, and a run that comes back could not go on as it was: "
                "leave it off, or CheckpointCallback out"
            )
        here, world_size = joined_world()
        if here != 0:
            return
        limit = args.save_total_limit
        if limit == 1 or (limit == 2 and args.metric_for_best_model):
            say(
                f"save_total_limit={limit}: the Trainer may remove the last complete checkpoint "
                "before it has another; let it be 3 or more"
            )
        path = _checkpoint(args, state)
        with contextlib.suppress(IncompleteError):  # step 0, or somebody else's checkpoint
            saved = checkpoint_files.read_marker(path)[0]
            if words := saved.difference(world_size, _settings(args, world_size)):
                say(f"goes on from {path.name} in another way than it was saved: {words}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and save if the agents ask for it."""
        runtime.step(state.global_step, state.max_steps)
        if runtime.should_checkpoint():
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint once all ranks have written theirs; stop if asked to."""
        path = _checkpoint(args, state)
        here, world_size = joined_world()
        gathered(None)
        files, problem = settled_together(path)
        publish = partial(mark, path, state.global_step, _settings(args, world_size), files)
        if not is_superseded():
            problem = problem or agreed_problem(publish if here == 0 else None)
            if not problem:
                runtime.checkpoint(path, state.global_step)
            elif here == 0:
                say_unsaved(state.global_step, f"{path.name} could not be marked: {problem}")
        # Only after the save: the Trainer would store the flag, and stop again when it resumes.
        if runtime.should_stop():
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Skip the save and evaluation at the end of an epoch that was cut short."""
        if runtime.should_stop():
            control.should_save = control.should_evaluate = False


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _settings(args: Any, world_size: int) -> dict[str, int]:
    """Return what must be equal for a resumed run to be the same training."""
    batch = args.train_batch_size * args.gradient_accumulation_steps * world_size
    return {"effective_batch": batch}


def resume_path(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in `output_dir`; None if there is none."""
    found = runtime.Checkpoints(output_dir).newest()
    return str(found.path) if found else None
