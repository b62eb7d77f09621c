"""Lay out the directory of a run: made whole or not at all, private to its user."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import os
import random
import shutil
import stat
from datetime import datetime
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.rundir.paths import RunPaths, RunsDir, directory_name
from clusterrun.rundir.record import current_user, user_name
from clusterrun.shared import files

if TYPE_CHECKING:
    from clusterrun.rendering.bundle import Bundle

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


def new_run_id(now: datetime, rng: random.Random) -> str:
    """Name a run by its time and four random letters: `1121-103252-k3fq`."""
    return f"{now:%m%d-%H%M%S}-{''.join(rng.choices(_LETTERS, k=4))}"


def create_run(runs_dir: RunsDir, name: str, run_id: str, bundle: Bundle) -> RunPaths:
    """Make the directory of a run with all files of its bundle, private to the user.

    An error leaves nothing behind. Raises ClusterrunError with the path and the reason,
    UsageError for a place where others can write.
    """
    root = RunsDir(root=runs_dir.root.absolute())
    paths = root.run(directory_name(name), run_id)
    above = (paths.root.parent, root.by_job, root.root)
    paths = dataclasses.replace(paths, made=tuple(filterfalse(os.path.lexists, above)))
    undo = _remove_made
    try:
        _make_parents(root, paths)
        paths.root.mkdir(mode=0o700)
        undo = remove_run
        paths.slurm_dir.mkdir(mode=0o700)
        for file, text in bundle.files.items():
            write_config(paths.root / file, text)
    except BaseException as error:
        undo(paths)
        if isinstance(error, OSError):
            raise ClusterrunError(
                f"cannot make the run directory {paths.root}",
                cause=str(error),
                hint="choose another place with --run-dir",
            ) from error
        raise
    return paths


def _make_parents(runs_dir: RunsDir, paths: RunPaths) -> None:
    """Make the directories of all runs, private; those above them by the umask.

    Raises UsageError for one in which another user could replace our run.
    """
    own = f"use a directory of your own: --run-dir {runs_dir.root / current_user()}"
    runs_dir.root.parent.mkdir(parents=True, exist_ok=True)
    for directory in (runs_dir.root, runs_dir.by_job, paths.root.parent):
        directory.mkdir(mode=0o700, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            owner = user_name(directory.stat().st_uid)
            raise UsageError(
                f"{directory} belongs to {owner}, and you cannot write in it", hint=own
            )
        if _is_shared(directory.stat()):
            raise UsageError(
                f"others can write in {directory}, and could replace your run by theirs",
                hint=(own, f"or close it: chmod go-w {directory}"),
            )


def _is_shared(found: os.stat_result) -> bool:
    """Whether other users can rename what is in a directory."""
    if found.st_mode & stat.S_ISVTX:
        return False
    by_group = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)


def _is_private(group_id: int) -> bool:
    """Whether a group is a user's own, as with a umask of 002."""
    try:
        return grp.getgrgid(group_id).gr_name == current_user()
    except KeyError:
        return False


def write_config(path: Path, text: str) -> None:
    """Write a file of a bundle, private; scripts can be executed."""
    is_script = path.suffix in (".sh", ".sbatch")
    files.write_whole(path, text, mode=files.PRIVATE_EXECUTABLE if is_script else files.PRIVATE)


def remove_run(paths: RunPaths) -> None:
    """Remove a run that was never submitted, and the empty directories that it made above it.

    Only the paths that `create_run` returned name those.
    """
    shutil.rmtree(paths.root, ignore_errors=True)
    _remove_made(paths)


def _remove_made(paths: RunPaths) -> None:
    for directory in paths.made:
        with contextlib.suppress(OSError):
            directory.rmdir()
