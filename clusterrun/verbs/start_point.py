"""Where a run resumes: the chosen checkpoint, and newer ones that must not take its place."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import UsageError
from clusterrun.rundir.outcome import read_outcome
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files
from clusterrun.shared.checkpoint_files import ANY, Checkpoint, IncompleteError

LATEST, SCRATCH = "latest", "scratch"
_STEP = re.compile(r"(?:step|checkpoint)-0{0,18}([0-9]{1,18})\Z")


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """A complete checkpoint, or None for the beginning.

    `passed_over` lists each newer one that can't be used, with the reason; `newer` are those that
    the training would prefer.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()
    newer: tuple[Path, ...] = ()


def choose(paths: RunPaths, text: str, names: re.Pattern[str] = ANY) -> StartPoint:
    """Resolve `latest`, `scratch`, `step-N` or the path of a checkpoint of a run.

    `latest` is one of `names`. Raises UsageError if the run has no complete checkpoint like that.
    """
    if text == SCRATCH:
        listed = checkpoint_files.listed(paths.checkpoints_dir, ANY)
        return StartPoint(checkpoint=None, newer=tuple(path for _, path in listed))
    if text == LATEST:
        found, notes = checkpoint_files.newest(paths.checkpoints_dir, names)
        last = read_outcome(paths, paths.newest_attempt())
        if found is None and not (last and last.is_handled):  # else the script finds its own
            raise UsageError(
                f"there is no complete checkpoint in {paths.checkpoints_dir}",
                cause="\n".join(notes) or None,
                hint="start the script from the beginning with --from scratch",
            )
        return StartPoint(checkpoint=found, passed_over=tuple(notes))
    return _named(paths, text, names)


def _named(paths: RunPaths, text: str, names: re.Pattern[str]) -> StartPoint:
    """Read the checkpoint of one step, and only the names of the others."""
    step = _step_of(paths, text)
    listed = checkpoint_files.listed(paths.checkpoints_dir, names)
    named = next((path for found, path in listed if found == step), None)
    if named is None:
        known = ", ".join(f"step-{found}" for found, _ in listed)
        hint = f"this run has {known}" if known else "this run has no checkpoint"
        raise UsageError(f"there is no checkpoint of step {step} in this run", hint=hint)
    try:
        checkpoint = checkpoint_files.read(named)
    except IncompleteError as problem:
        raise UsageError(f"checkpoint {named.name} is incomplete", cause=str(problem)) from problem
    newer = tuple(path for found, path in listed if found > step)
    return StartPoint(checkpoint=checkpoint, newer=newer)


def _step_of(paths: RunPaths, text: str) -> int:
    """Read `step-N`, or the path of a checkpoint of this run."""
    path = Path(os.path.abspath(text))
    is_path = "/" in text
    match = _STEP.match(path.name if is_path else text)
    directory, step = paths.checkpoints_dir, int(match[1]) if match else -1
    is_trainers = checkpoint_files.trainer_record(directory, str(path.parent), step).is_dir()
    if is_path and not is_trainers and path.parent.resolve() != directory.resolve():
        raise UsageError(
            f"{text} is not a checkpoint of this run",
            hint=f"copy it to {directory}, then pass its step, e.g. step-100",
        )
    if match is None:
        raise UsageError(
            f"'{text}' is neither latest, scratch, step-N nor the path of a checkpoint",
            hint="write it as step-100",
        )
    return step


def set_aside(paths: RunPaths, newer: tuple[Path, ...]) -> Callable[[], None]:
    """Move checkpoints out of the training's way; return a function that moves them back."""
    if not newer:
        return lambda: None
    place = paths.checkpoints_dir / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    place.mkdir(mode=0o700)
    moved: list[Path] = []

    def back() -> None:
        for path in moved:
            (place / path.name).rename(path)
        place.rmdir()

    try:
        for path in newer:
            path.rename(place / path.name)
            moved.append(path)
    except BaseException:
        back()
        raise
    return back
