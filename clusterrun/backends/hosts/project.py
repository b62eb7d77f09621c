"""The project of a job: which of its files are copied to hosts that do not have them."""

from __future__ import annotations

import functools
import itertools
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

    Raises ClusterrunError if it is too large or links to other places.
    """
    skips = functools.cache(functools.partial(_is_no_source, leave_out=frozenset(leave_out)))
    is_git = any(os.path.exists(place / ".git") for place in (root, *root.parents))
    notes: list[str] = []
    tracked, others = _git_files(root, notes) if is_git else ([], _all_files(root, skips, notes))
    others = [n for n in others if not any(map(skips, (root / n).parents[: n.count("/")]))]
    secrets = _secrets(root, {*others} - {*tracked})
    notes += (f"{name} is not copied: it may hold a secret" for name in secrets)
    sizes = dict(_sizes(root, sorted({*tracked, *others} - {*secrets})))
    _check_size(sizes, is_git=is_git)
    return Project(root=root, names=tuple(sizes), notes=tuple(notes))


def check_paths(project: Project, entry: Sequence[str]) -> list[str]:
    """Return notes on paths that the hosts must have. Raises UsageError for one they cannot have.

    `entry` is the script, or -m and a module, and its arguments. Only paths that exist here are
    judged.
    """
    notes = []
    root = str(project.root)
    for what, path in [("the script", entry[0]), *inputs(entry[1:])]:
        inside = os.path.relpath(os.path.join(root, path), root)
        is_outside = inside.split("/")[0] == ".."
        is_copied = inside == "." or any(f"{n}/".startswith(f"{inside}/") for n in project.names)
        if not os.path.exists(os.path.join(root, path)):
            continue
        if os.path.isabs(path) and is_outside:
            notes.append(f"{what}: {path} is not copied; every host must have it")
        elif os.path.isabs(path):
            hint = f"write {inside}, since the job runs in a copy of the project"
            raise UsageError(f"{what}: {path} exists only on this machine", hint=hint)
        elif not is_copied:
            hint = "name a path that every host has, or one in the project that git does not ignore"
            raise UsageError(f"{what}: {path} is not copied to the hosts", hint=hint)
    return notes


def _git_files(root: Path, notes: list[str]) -> tuple[list[str], list[str]]:
    """Return tracked files, and others that are not ignored; also those of repositories within."""
    argv = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-t", "--exclude-standard"]
    argv += ["--cached", "--others"]
    try:
        done = subprocess.run(argv, cwd=root, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        cause = os.fsdecode(getattr(error, "stderr", None) or str(error).encode()).strip()
        text = f"cannot list the files of {root}"
        raise ClusterrunError(text, cause=cause, hint=f"run git -C {root} ls-files") from error
    notes += (f"not everything is copied: {line}" for line in os.fsdecode(done.stderr).splitlines())
    tracked: list[str] = []
    others: list[str] = []
    for kind, _, name in (os.fsdecode(row).partition(" ") for row in done.stdout.split(b"\0")[:-1]):
        (others if kind == "?" else tracked).append(name)
    for name in [*tracked, *others]:
        if os.path.exists(root / name / ".git"):
            for found, more in zip((tracked, others), _git_files(root / name, notes), strict=True):
                found += (os.path.join(name, inner) for inner in more)
    return tracked, others


def _all_files(root: Path, skips: Callable[[Path], bool], notes: list[str]) -> list[str]:
    def failed(error: OSError) -> None:
        name = os.path.relpath(error.filename, root)
        notes.append(f"{name} is not copied: it can't be read ({error.strerror})")

    def walk() -> Iterator[str]:
        for place, directories, files in os.walk(root, onerror=failed):
            links = [name for name in directories if os.path.islink(os.path.join(place, name))]
            directories[:] = [name for name in directories if not skips(Path(place, name))]
            yield from (os.path.relpath(os.path.join(place, n), root) for n in (*files, *links))

    return list(itertools.islice(walk(), MOST_FILES + 1))


def _is_no_source(directory: Path, leave_out: Collection[Path]) -> bool:
    """Return whether a directory holds no source: an environment, a checkpoint, runs."""
    made = ("pyvenv.cfg", "conda-meta", MARKER)
    is_made = any(os.path.exists(directory / name) for name in made)
    return is_made or directory.name in _OTHERS or directory in leave_out


def _secrets(root: Path, names: Collection[str]) -> list[str]:
    """Return the files with credentials, by their names and by how settings begin."""

    def beginning(name: str) -> str:
        return end_of(root / name, _BEGINNING, until=_BEGINNING).decode("utf-8", "replace")

    return [n for n in sorted(names) if is_secret_file(n, functools.partial(beginning, n))]


def _sizes(root: Path, names: Sequence[str]) -> Iterator[tuple[str, int]]:
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
    target = os.readlink(root / name)
    real = Path(os.path.realpath(root / name))
    if os.path.isabs(target) or not real.is_relative_to(os.path.realpath(root)):
        raise UsageError(
            f"the project has a link that is broken on other hosts: {name} -> {target}",
            hint="let git ignore it, and name the target itself in the script's arguments",
        )


def _check_size(sizes: dict[str, int], *, is_git: bool) -> None:
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
                raise ClusterrunError(
                    f"cannot copy {name}",
                    cause=error.strerror or str(error),
                    hint="submit again if it is being written; otherwise check its permissions",
                ) from error
    stream.seek(0)  # this writes the rest of a file
    return stream


def unpack(stream: BinaryIO, target: Path) -> None:
    """Unpack a project into a new private directory, whole or not at all.

    Raises ClusterrunError.
    """
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
