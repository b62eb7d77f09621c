"""The project of a job: which of its files are copied to hosts that do not have them."""

from __future__ import annotations

import functools
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from clusterrun.config.secrets import is_secret_file
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.launch.inputs import inputs
from clusterrun.shared.checkpoint_files import MARKER
from clusterrun.shared.files import end_of

MOST_BYTES: Final = 200 * 10**6
MOST_FILES: Final = 20_000
GIT_S: Final = 60.0

_OTHERS = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules"})
_BEGINNING: Final = 4096  # bytes of settings that are searched for credentials
_BAD_STREAM = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error)


@dataclass(frozen=True, kw_only=True)
class Project:
    """The files of a directory that are copied, by their names relative to it."""

    root: Path
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def find_project(root: Path, *, leave_out: Collection[Path] = ()) -> Project:
    """Return the project of a working directory: what git would commit, else all files.

    Of files that git does not track, leave out those that may hold a secret or are no source, as in
    the places `leave_out`. Raises ClusterrunError if the project is too large or links elsewhere.
    """
    is_no_source = functools.cache(lambda directory: _is_no_source(directory, leave_out))
    is_git = any(os.path.exists(place / ".git") for place in (root, *root.parents))
    notes: list[str] = []
    found = _git_files(root, notes) if is_git else _all_files(root, is_no_source, notes)
    tracked = {name for name, is_tracked in found.items() if is_tracked}
    untracked = {
        name
        for name in found.keys() - tracked
        if not any(map(is_no_source, (root / name).parents[: name.count("/")]))  # within the root
    }
    secrets = _secrets(root, untracked)
    notes += (f"{name} is not copied: it may hold a secret" for name in secrets)
    sizes = dict(_sizes(root, sorted((tracked | untracked).difference(secrets))))
    _check_size(sizes, is_git=is_git)
    return Project(root=root, names=tuple(sizes), notes=tuple(notes))


def check_paths(project: Project, entry: Sequence[str]) -> list[str]:
    """Return notes on paths that the hosts must have. Raises UsageError for one they cannot have.

    `entry` is the script, or -m and a module, and its arguments. Paths that do not exist here are
    not judged.
    """
    notes = []
    root = str(project.root)
    for what, path in [("the script", entry[0]), *inputs(entry[1:])]:
        if not os.path.exists(os.path.join(root, path)):
            continue
        inside = os.path.relpath(os.path.join(root, path), root)
        is_outside = inside.split("/")[0] == ".."
        # A directory is copied if a file in it is.
        is_copied = inside == "." or any(f"{n}/".startswith(f"{inside}/") for n in project.names)
        if os.path.isabs(path) and is_outside:
            notes.append(f"{what}: {path} is not copied; every host must have it")
        elif os.path.isabs(path):
            hint = f"use the relative path {inside}: the job runs in a copy of the project"
            raise UsageError(f"{what}: {path} exists only on this machine", hint=hint)
        elif not is_copied:
            hint = "name a path that every host has, or one in the project that git does not ignore"
            raise UsageError(f"{what}: {path} is not copied to the hosts", hint=hint)
    return notes


def _git_files(root: Path, notes: list[str]) -> dict[str, bool]:
    """Return the files that git does not ignore, also in inner repositories; True if tracked."""
    argv = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-t", "--exclude-standard"]
    argv += ["--cached", "--others"]
    try:
        done = subprocess.run(argv, cwd=root, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        cause = os.fsdecode(getattr(error, "stderr", None) or str(error).encode()).strip()
        text = f"cannot list the files of {root}"
        raise ClusterrunError(text, cause=cause, hint=f"run git -C {root} ls-files") from error
    notes += (f"not everything is copied: {line}" for line in os.fsdecode(done.stderr).splitlines())
    found: dict[str, bool] = {}
    for row in done.stdout.split(b"\0")[:-1]:
        tag, _, name = os.fsdecode(row).partition(" ")
        found[name] = tag != "?"  # git's mark of a file that it does not track
    for name in [*found]:
        if os.path.exists(root / name / ".git"):  # a repository within
            within = _git_files(root / name, notes)
            found |= {os.path.join(name, inner): tracked for inner, tracked in within.items()}
    return found


def _all_files(root: Path, skips: Callable[[Path], bool], notes: list[str]) -> dict[str, bool]:
    """Return all files and links, marked as not tracked; stop once there are too many to copy."""

    def failed(error: OSError) -> None:
        name = os.path.relpath(error.filename, root)
        notes.append(f"{name} is not copied: it can't be read ({error.strerror})")

    found: dict[str, bool] = {}
    for place, directories, files in os.walk(root, onerror=failed):
        links = [name for name in directories if os.path.islink(os.path.join(place, name))]
        directories[:] = [name for name in directories if not skips(Path(place, name))]
        for name in (*files, *links):
            found[os.path.relpath(os.path.join(place, name), root)] = False
            if len(found) > MOST_FILES:
                return found
    return found


def _is_no_source(directory: Path, leave_out: Collection[Path]) -> bool:
    """Return whether a directory holds no source: an environment, a checkpoint, runs."""
    made = ("pyvenv.cfg", "conda-meta", MARKER)
    is_made = any(os.path.exists(directory / name) for name in made)
    return is_made or directory.name in _OTHERS or directory in leave_out


def _secrets(root: Path, names: Collection[str]) -> list[str]:
    """Return the files with credentials, by their names and by the first bytes of settings."""

    def beginning(name: str) -> str:
        return end_of(root / name, _BEGINNING, until=_BEGINNING).decode("utf-8", "replace")

    return [n for n in sorted(names) if is_secret_file(n, functools.partial(beginning, n))]


def _sizes(root: Path, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of files and links. Raises UsageError for a link that leads out."""
    for name in names:
        try:
            info = os.lstat(root / name)
        except OSError:
            continue  # removed, but still in git's index
        if stat.S_ISLNK(info.st_mode):
            _check_link(root, name)
        if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            yield name, info.st_size


def _check_link(root: Path, name: str) -> None:
    """Raise UsageError for a link that means nothing, or something else, on another host."""
    target = os.readlink(root / name)
    real = Path(os.path.realpath(root / name))
    if os.path.isabs(target) or not real.is_relative_to(os.path.realpath(root)):
        text = f"the project has a link that is broken on other hosts: {name} -> {target}"
        hint = "let git ignore the link, and name its target in the script's arguments"
        raise UsageError(text, hint=hint)


def _check_size(sizes: dict[str, int], *, is_git: bool) -> None:
    """Raise UsageError if there are too many bytes or files to copy."""
    total = sum(sizes.values())
    if total <= MOST_BYTES and len(sizes) <= MOST_FILES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    listed = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
    size = f"{total / 1e6:.0f} MB" if total > MOST_BYTES else f"more than {MOST_FILES:,} files"
    ignore = "list what the job does not need in .gitignore"
    raise UsageError(
        f"the project is too large to copy to the hosts: {size}",
        cause=f"the largest files: {listed}",
        hint=(
            ignore if is_git else f"run 'git init' and {ignore}",
            f"put data on the hosts: at most {MOST_BYTES // 10**6} MB are copied",
        ),
    )


# As one stream: a compressed tar


def pack(project: Project) -> BinaryIO:
    """Return a project in one stream, at its start. Raises ClusterrunError if it is unreadable."""
    stream = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for name in project.names:
            try:
                tar.add(project.root / name, name, recursive=False)
            except OSError as error:  # also: shorter than it was when it was opened
                text, cause = f"cannot copy {name}", error.strerror or str(error)
                hint = "submit again once the file is complete, or check its permissions"
                raise ClusterrunError(text, cause=cause, hint=hint) from error
    stream.seek(0)  # this also writes what is still in the buffer
    return stream


def unpack(stream: BinaryIO, target: Path) -> None:
    """Unpack a project into a new private directory, or write nothing. Raises ClusterrunError."""
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        stream.seek(0)
        with tarfile.open(fileobj=stream) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # older ones lack it
            tar.extractall(made)
        made.rename(target)
    except _BAD_STREAM as error:
        text = f"cannot write the project to {target}"
        raise ClusterrunError(text, cause=str(error)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
