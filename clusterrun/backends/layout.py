"""Lay out the directory of a run: made whole or not at all, private to its user."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
from datetime import datetime
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun import files
from clusterrun.errors import ClusterrunError
from clusterrun.paths import RunPaths, RunsDir, directory_name

if TYPE_CHECKING:
    from clusterrun.rendering.bundle import Bundle

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


def new_run_id(now: datetime, rng: random.Random) -> str:
    """Name a run by its time and four random letters: `1121-103252-k3fq`."""
    return f"{now:%m%d-%H%M%S}-{''.join(rng.choices(_LETTERS, k=4))}"


def create_run(runs_dir: RunsDir, name: str, run_id: str, bundle: Bundle) -> RunPaths:
    """Make the directory of a run with all files of its bundle, private to the user.

    On an error nothing of it is left. Raises ClusterrunError with the path and the reason.
    """
    root = RunsDir(root=runs_dir.root.absolute())
    paths = root.run(directory_name(name), run_id)
    above = (paths.root.parent, root.by_job, root.root)
    paths = dataclasses.replace(paths, made=tuple(filterfalse(os.path.lexists, above)))
    try:
        _make_parents(paths.root.parent)
        paths.root.mkdir(mode=0o700)
    except OSError as error:
        raise _cannot_write(paths, error) from error
    try:
        paths.slurm_dir.mkdir(mode=0o700)
        for file, text in bundle.files.items():
            write_config(paths.root / file, text)
    except BaseException as error:
        remove_run(paths)
        if isinstance(error, OSError):
            raise _cannot_write(paths, error) from error
        raise
    return paths


def _make_parents(directory: Path) -> None:
    """Make the directory of a name, and of all runs, private; what is above it by the umask."""
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def _cannot_write(paths: RunPaths, error: OSError) -> ClusterrunError:
    return ClusterrunError(
        f"cannot make the run directory {paths.root}",
        cause=str(error),
        hint="choose another place with --run-dir",
    )


def write_config(path: Path, text: str) -> None:
    """Write a file of a bundle, private; scripts can be executed."""
    is_script = path.suffix in (".sh", ".sbatch")
    files.write_whole(path, text, mode=files.PRIVATE_EXECUTABLE if is_script else files.PRIVATE)


def remove_run(paths: RunPaths) -> None:
    """Remove a run that was never submitted, and what its submission made above it, where empty.

    Only what `create_run` returned knows what that is.
    """
    shutil.rmtree(paths.root, ignore_errors=True)
    for directory in paths.made:
        with contextlib.suppress(OSError):
            directory.rmdir()
