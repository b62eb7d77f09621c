"""Create the directory of a run: completely or not at all, private to its user."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import grp
import os
import random
import shutil
import stat
from collections.abc import Iterable
from datetime import datetime
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.rundir.paths import RunPaths, RunsDir, directory_name
from clusterrun.rundir.record import current_user, link_target, user_name
from clusterrun.shared import files
from clusterrun.shared.locks import locked

if TYPE_CHECKING:
    from clusterrun.rendering.bundle import Bundle

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


def new_run_id(now: datetime, rng: random.Random) -> str:
    """Return a run id from the time and four random letters: `1121-103252-k3fq`."""
    return f"{now:%m%d-%H%M%S}-{''.join(rng.choices(_LETTERS, k=4))}"


def create_run(runs_dir: RunsDir, name: str, run_id: str, bundle: Bundle) -> RunPaths:
    """Create the directory of a run with all files of its bundle, private to the user.

    An error leaves nothing behind. Raises ClusterrunError with the path and the reason,
    UsageError for a directory that others can write to.
    """
    root = RunsDir(root=runs_dir.root.absolute())
    paths = root.run(directory_name(name), run_id)
    above = (paths.root.parent, root.by_job, root.root)  # made below if they do not exist
    paths = dataclasses.replace(paths, made=tuple(filterfalse(os.path.lexists, above)))
    undo = _remove_made  # once the run directory is ours: remove_run
    try:
        try:
            _make_parents(root, paths)
            paths.root.mkdir(mode=0o700)
        except FileNotFoundError:  # another submission failed, and removed the parents it had made
            _make_parents(root, paths)
            paths.root.mkdir(mode=0o700)
        undo = remove_run
        paths.slurm_dir.mkdir(mode=0o700)
        for file, text in bundle.files.items():
            write_config(paths.root / file, text)
    except BaseException as error:
        undo(paths)
        if isinstance(error, OSError):
            text = f"cannot create the run directory {paths.root}"
            hint = "choose another directory with --run-dir"
            raise ClusterrunError(text, cause=str(error), hint=hint) from error
        raise
    return paths


def _make_parents(runs_dir: RunsDir, paths: RunPaths) -> None:
    """Create the private directories above a run. Raises UsageError if others could replace it."""
    own = f"use your own directory: --run-dir {runs_dir.root / current_user()}"
    runs_dir.root.parent.mkdir(parents=True, exist_ok=True)  # follows the umask
    for directory in (runs_dir.root, runs_dir.by_job, paths.root.parent):
        directory.mkdir(mode=0o700, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            owner = user_name(directory.stat().st_uid)
            text = f"you cannot write to {directory}, which belongs to {owner}"
            is_root = directory == runs_dir.root
            home = "use your own directory: --run-dir ~/clusterrun-runs"
            raise UsageError(text, hint=home if is_root else own)
        if _others_can_rename(directory.stat()):
            raise UsageError(
                f"other users can write to {directory} and could replace your run",
                hint=(own, f"or remove their permission: chmod go-w {directory}"),
            )


def _others_can_rename(directory: os.stat_result) -> bool:
    """Return whether other users can rename entries of a directory."""
    writable = stat.S_IWOTH | stat.S_IWGRP
    with contextlib.suppress(KeyError):  # the group has no name
        if grp.getgrgid(directory.st_gid).gr_name == current_user():  # the user's private group
            writable = stat.S_IWOTH
    return bool(directory.st_mode & writable) and not directory.st_mode & stat.S_ISVTX  # sticky


def write_config(path: Path, text: str) -> None:
    """Write a private file of a bundle; scripts are executable."""
    is_script = path.suffix in (".sh", ".sbatch")
    files.write_whole(path, text, mode=files.PRIVATE_EXECUTABLE if is_script else files.PRIVATE)


def remove_run(paths: RunPaths) -> None:
    """Remove a run that was never submitted, and the directories that `create_run` made for it."""
    shutil.rmtree(paths.root, ignore_errors=True)
    _remove_made(paths)


def _remove_made(paths: RunPaths) -> None:
    """Remove the directories that `create_run` made above a run, if they are empty."""
    for directory in paths.made:
        with contextlib.suppress(OSError):
            directory.rmdir()


def remove_old(runs_dir: RunsDir, runs: Iterable[RunPaths]) -> None:
    """Remove runs, the links of their jobs, and what an interrupted removal has left.

    A run is renamed first, so that no command lists one that is partly removed. Raises OSError, and
    ClusterrunError for a run that is being resumed.
    """
    top = runs_dir.removed(os.getuid())
    if os.path.lexists(top) and (top.is_symlink() or top.lstat().st_uid != os.getuid()):
        raise PermissionError(errno.EPERM, "it is a link, or belongs to another user", str(top))
    for paths in runs:
        aside = top / paths.root.parent.name
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(paths.resume_lock, 0):
            paths.root.rename(aside / paths.root.name)
        with contextlib.suppress(OSError):  # other runs of that name are left
            paths.root.parent.rmdir()
    removed = [runs_dir.run(path.parent.name, path.name) for path in top.glob("*/*")]
    targets = {link_target(paths) for paths in removed}
    for link in runs_dir.by_job.glob("*") if removed else ():
        if link.is_symlink() and os.readlink(link) in targets:
            link.unlink()
    if top.is_dir():
        shutil.rmtree(top)
