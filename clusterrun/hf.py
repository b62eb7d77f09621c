"""Checkpoints of Hugging Face's Trainer that are asked for, complete, and found again.

    trainer = Trainer(..., callbacks=[CheckpointCallback()])
    trainer.train(resume_from_checkpoint=resume_path(trainer.args.output_dir))

This module needs transformers; nothing else here imports it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from clusterrun import checkpoints, runtime
from clusterrun.checkpointing import (
    agreed_problem,
    gathered,
    is_superseded,
    joined_world,
    own_attempt,
    say_unsaved,
    settled_together,
)


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Save when the job asks, mark what was saved as complete, and leave when the job must end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell of the step, and save after it where the agents ask for it."""
        runtime.step(state.global_step, state.max_steps)
        if runtime.should_checkpoint():
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint once all ranks have written theirs; leave if that was asked."""
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        here, world_size = joined_world()
        effective_batch = args.train_batch_size * args.gradient_accumulation_steps * world_size

        def mark() -> None:
            checkpoints.mark(
                path,
                state.global_step,
                world_size=world_size,
                attempt=own_attempt(),
                settings={"effective_batch": effective_batch},
                files=files,
            )

        gathered(None)
        files, problem = settled_together(path)
        if not is_superseded():
            problem = problem or agreed_problem(mark if here == 0 else None)
            if not problem:
                runtime.checkpoint(path, state.global_step)
            elif here == 0:
                say_unsaved(state.global_step, f"{path.name} could not be marked: {problem}")
        # Not before: the Trainer would save the wish to stop, and obey it when it resumes.
        if runtime.should_stop():
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Spend no more time where the job must end; the Trainer ends its epoch early for that."""
        if runtime.should_stop():
            control.should_save = control.should_evaluate = False


def resume_path(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in `output_dir`; None where there is none."""
    found = runtime.Checkpoints(output_dir).newest()
    return str(found.path) if found else None
