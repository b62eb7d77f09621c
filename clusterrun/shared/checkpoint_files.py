"""Checkpoints on disk: which are complete, which is the newest, which to remove.

A checkpoint is a directory `step-00000100`, or `checkpoint-100` as Hugging Face's Trainer names it.
It is complete once it contains a valid `.complete`. That file is written last, and lists every file
with its size and checksum. An interrupted save leaves a directory that is skipped.

The marker of what a Trainer saves elsewhere is in another directory, `trainer-100.<folder>`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clusterrun.errors import ClusterrunError
from clusterrun.shared.files import BY_UMASK, open_new, replacing

SCHEMA = "clusterrun.checkpoint/1"
MARKER = ".complete"
WHOLE_BYTES = 64 << 20  # sample larger files: reading terabytes takes too long
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_CHUNK = 1 << 20
_CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # of a directory, on some file systems
_Result = TypeVar("_Result")
_THREADS = 8
OWN = re.compile(r"(?:step|checkpoint)-(\d+)", re.ASCII)
ANY = re.compile(r"(?:step|checkpoint|trainer)-(\d+)(?:\.[0-9a-f]{8})?", re.ASCII)  # and records
TRAINERS = re.compile(r"trainer-(\d+)\.[0-9a-f]{8}", re.ASCII)  # records of what a Trainer saved
_UNFINISHED = re.compile(r"\.step-\d+\.a(\d+)\.tmp", re.ASCII)
# A rank's files as torch, accelerate and DeepSpeed name them: rank_3, __3_0.distcp, states_3.pkl.
_OWNER = re.compile(r"(?:rank_?|__)(\d+)|(?<!-of)[_-](\d+)\.\w+$", re.ASCII)
_GONE = ".gone"
Sums = Mapping[str, tuple[int, int]]  # name: size and checksum
UNREAD = -1  # in place of a checksum: the file is known by its size alone


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint; `settings` are those of the script when it saved.

    `overrides` lists the settings that resumed runs changed on purpose, oldest first, each with its
    old and new value: {"step": 60, "settings": {"lr": [0.0001, 5e-05]}}. If the nodes share no
    directory, `nodes` lists the files that each node wrote.
    """

    path: Path
    step: int
    world_size: int
    attempt: int = 1
    saved_at: float = field(default_factory=lambda: round(time.time(), 6))
    settings: Mapping[str, Any]
    overrides: Sequence[Mapping[str, Any]] = ()
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def changed(self, settings: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the settings that differ, each with its old and new value (None: not set)."""
        new = json.loads(json.dumps(dict(settings), default=str))  # types as in a marker
        names = sorted({*self.settings, *new})
        pairs = {name: [self.settings.get(name), new.get(name)] for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def difference(
        self, world_size: int | None, settings: Mapping[str, Any], *, override: Collection[str] = ()
    ) -> str:
        """Describe how this world and its settings differ from the saved ones; "" if equal.

        `world_size` None accepts any world; settings named in `override` may differ.
        Raises ClusterrunError for a name in `override` that is not a setting.
        """
        if unknown := sorted({*override} - {*self.settings, *settings}):
            known = ", ".join(sorted({*self.settings, *settings}))
            text = f"there is no setting {', '.join(unknown)} to override"
            raise ClusterrunError(text, hint=f"use one of these settings: {known}" if known else ())
        differences = [
            f"{name} was {was} and is {now}"
            for name, (was, now) in self.changed(settings).items()
            if name not in override
        ]
        if world_size not in (None, self.world_size):
            differences.append(f"the number of ranks was {self.world_size} and is {world_size}")
        return "; ".join(differences)


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step's complete checkpoint."""
    return directory / f"step-{step:08d}"


def unfinished_directory(directory: Path, step: int, attempt: int) -> Path:
    """Return the directory in which a step's checkpoint is written."""
    return directory / f".step-{step:08d}.a{attempt}.tmp"


def trainer_record(directory: Path, folder: str, step: int) -> Path:
    """Return the directory that records what the Trainer saved in `folder` at a step."""
    return directory / f"trainer-{step}.{zlib.crc32(os.fsencode(folder)):08x}"


def listed(directory: Path, names: re.Pattern[str] = OWN) -> list[tuple[int, Path]]:
    """Return the step and path of all checkpoints, complete or not, newest first."""
    return [] if not directory.is_dir() else newest_first(directory.iterdir(), names)


def newest_first(paths: Iterable[Path], names: re.Pattern[str] = OWN) -> list[tuple[int, Path]]:
    """Return the step and path of those that are named as checkpoints, newest first."""
    matches = ((names.fullmatch(path.name), path) for path in paths)
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def newest(
    directory: Path, names: re.Pattern[str] = ANY, *, contents: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint, and a line about each newer incomplete one."""
    notes: list[str] = []
    for _, path in listed(directory, names):  # ANY includes the records of a Trainer's checkpoints
        try:
            # Without `contents`, compare only sizes: one process can't read what thousands wrote.
            return read(path, contents=contents), notes
        except IncompleteError as problem:
            notes.append(passed_over(path, str(problem)))
    return None, notes


def passed_over(path: Path, problem: str) -> str:
    """Return a line on why a checkpoint is not used."""
    name = path.stem.replace("trainer-", "checkpoint-")  # a record is also named for its folder
    return f"checkpoint {name} is incomplete and was skipped: {problem}"


def check_room(directory: Path, node: str = "") -> None:
    """Raise OSError if the newest checkpoint, or this node's part of it, takes more than is free.

    Check before a save: if one rank fails during it, the others wait in collectives of the save.
    """
    checkpoints = (_marked_files(path, node) for _, path in listed(directory))
    last = next((files for files in checkpoints if files), None)
    if last is None:  # how much a checkpoint takes is not known
        return
    needed = sum(size for size, _ in last.values())
    disk = shutil.disk_usage(directory)  # 0 bytes if the file system reports no size
    if disk.total and disk.free < needed:
        unit, size = ("MiB", 1 << 20) if needed >= 1 << 20 else ("KiB", 1 << 10)
        rounded_up = (needed + size - 1) // size
        words = f"{rounded_up} {unit} are needed, {disk.free // size} {unit} are free"
        raise OSError(errno.ENOSPC, words)


def mark(checkpoint: Checkpoint, files: Sums | None = None, *, record: Path | None = None) -> None:
    """Write the marker of a checkpoint after its files are on the disk. Raises OSError.

    `files` are those that the marker lists, as `sync` returns them; None: sync and list all.
    If nodes share no directory, each node writes a marker that lists only its own files. `record`
    is the directory for the marker if it is not the checkpoint's.
    """
    directory = record or checkpoint.path
    files = sync(directory, file_names(directory)) if files is None else files
    about = {name: value for name, value in vars(checkpoint).items() if name != "path"}
    target = {"target": checkpoint.path} if record else {}
    marker = {"schema": SCHEMA, **about, **target, "files": dict(files)}
    text = json.dumps(marker, indent=1, default=str)
    with replacing(directory / MARKER) as temporary, open_new(temporary, BY_UMASK) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(directory)


def publish(unfinished: Path, final: Path) -> None:
    """Give a marked checkpoint its final name; set aside an older one with that name."""
    older = _removal_path(final)
    with contextlib.suppress(FileNotFoundError):
        final.rename(older)
    try:
        unfinished.rename(final)
    except OSError:  # restore the older one
        with contextlib.suppress(OSError):
            older.rename(final)
        raise
    _sync_directory(final.parent)


def prune(directory: Path, keep: int, *, up_to: int | None = None) -> None:
    """Set aside what is older than the newest `keep` complete checkpoints.

    Ignore those beyond step `up_to`: they are from before the training was set back. Markers and
    sizes decide what is complete; contents are not read.
    """
    checkpoints = [path for step, path in listed(directory) if up_to is None or step <= up_to]
    kept = 0
    for path in checkpoints if len(checkpoints) > keep else ():  # newest first; () if all stay
        if kept == keep:
            path.rename(_removal_path(path))
        else:
            with contextlib.suppress(IncompleteError):  # stays, but does not count
                read(path, contents=False)
                kept += 1


def set_unfinished_aside(directory: Path, attempt: int) -> None:
    """Set aside the remains of interrupted saves of this attempt and earlier ones."""
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _UNFINISHED.fullmatch(path.name)
        if match and int(match[1]) <= attempt:
            with contextlib.suppress(OSError):
                path.rename(_removal_path(path))


def _removal_path(path: Path) -> Path:
    """Return a hidden path for a checkpoint before its removal, which may be interrupted."""
    return path.with_name(f".{path.name.lstrip('.')}.{time.time_ns()}{_GONE}")


def awaiting_removal(directory: Path) -> list[Path]:
    """Return the checkpoints that were set aside and still exist."""
    return [path for path in directory.iterdir() if path.name.endswith(_GONE)]


class IncompleteError(Exception):
    """A checkpoint can't be used."""


def read(path: Path, *, contents: bool = True) -> Checkpoint:
    """Read a checkpoint, and compare its files with its marker. Raises IncompleteError."""
    checkpoint, files = read_marker(path)
    check(checkpoint.path, files, contents=contents)
    return checkpoint


def read_marker(path: Path) -> tuple[Checkpoint, Sums]:
    """Read the marker of a checkpoint. Raises IncompleteError."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in marker["files"].items()}
        checkpoint = Checkpoint(
            path=Path(marker.get("target", path)),  # the target, if a Trainer saved it elsewhere
            step=int(marker["step"]),
            world_size=int(marker["world_size"]),
            attempt=int(marker["attempt"]),
            saved_at=float(marker["saved_at"]),
            settings=dict(marker["settings"]),
            overrides=tuple(marker.get("overrides", ())),
            nodes=dict(marker.get("nodes", {})),
        )
        if marker["schema"] != SCHEMA:
            raise IncompleteError(f"its {MARKER} has an unknown schema: {marker['schema']}")
    except FileNotFoundError:
        words = "the save did not finish, or another program wrote it"
        raise IncompleteError(f"it has no {MARKER}: {words}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise IncompleteError(f"its {MARKER} can't be read") from None
    return checkpoint, files


def check(path: Path, files: Sums, *, contents: bool = True) -> None:
    """Raise IncompleteError for a missing file, another size or, if `contents`, a bad checksum."""

    def check_one(name: str) -> None:
        size, crc = files[name]  # UNREAD instead of a checksum: only the size is known
        try:
            actual_size = (path / name).stat().st_size
            if actual_size != size:
                raise IncompleteError(f"{name} has {actual_size} bytes instead of {size}")
            if contents and crc != UNREAD and checksum(path / name) != crc:
                raise IncompleteError(f"{name} is damaged: its checksum differs from the saved one")
        except (FileNotFoundError, NotADirectoryError):
            raise IncompleteError(f"{name} is missing") from None
        except OSError as error:
            raise IncompleteError(f"{name} can't be read: {error.strerror}") from None

    _map_in_threads(check_one, files)


def sync(path: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Sync these files to the disk; return their sizes and checksums. Raises OSError."""

    def sync_one(name: str) -> tuple[int, int]:
        with open(path / name, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size, checksum(path / name)

    return dict(zip(names, _map_in_threads(sync_one, names), strict=True))


def file_names(path: Path) -> list[str]:
    """Return the sorted names of all files below a checkpoint but the marker. Raises OSError."""

    def raise_error(error: OSError) -> None:  # os.walk would ignore it
        raise error

    walk = os.walk(path, onerror=raise_error)
    files = (os.path.join(folder, name) for folder, _, names in walk for name in names)
    return sorted({os.path.relpath(file, path) for file in files} - {MARKER})


def of_first_rank(names: Iterable[str]) -> list[str]:
    """Leave out the files that are named for other ranks, which may still write them."""
    return [name for name in names if _owner(name) in (0, None)]


def own_share(names: Sequence[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank syncs or checks: those named for it, and a share of others."""
    # An owner's node has its files in the page cache. An owner's number may exceed `world_size`.
    owners = [_owner(name) for name in names]
    handlers = (position if owner is None else owner for position, owner in enumerate(owners))
    pairs = zip(names, handlers, strict=True)
    return [name for name, handler in pairs if handler % world_size == rank]


def _owner(name: str) -> int | None:
    """Return the rank that a file is named for; None if it is named for none."""
    match = _OWNER.search(name)
    return int(match[1] or match[2]) if match else None


def _marked_files(path: Path, node: str) -> Sums | None:
    """Return the files that the marker lists, or this node's; None if it is not valid."""
    try:
        checkpoint, files = read_marker(path)
    except IncompleteError:
        return None
    names = checkpoint.nodes.get(node, ()) if checkpoint.nodes else files
    return {name: files[name] for name in names if name in files}


def _map_in_threads(function: Callable[[str], _Result], names: Iterable[str]) -> list[_Result]:
    """Call a function with each file name, in threads, since a remote disk is slow to answer."""
    from concurrent.futures import ThreadPoolExecutor  # imports `logging`: only if needed

    names = list(names)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(function, names))
    except RuntimeError:  # the interpreter is exiting and starts no more threads
        return list(map(function, names))


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file, or of evenly spaced blocks if it is large."""
    crc = 0
    with open(file, "rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= WHOLE_BYTES:
            while chunk := opened.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
            return crc
        last = size - SAMPLE_BYTES
        for offset in sorted({0, last, *(last * n // SAMPLES for n in range(SAMPLES))}):
            crc = zlib.crc32(os.pread(opened.fileno(), SAMPLE_BYTES, offset), crc)
    return crc


def _sync_directory(path: Path) -> None:
    """Sync the entries of a directory to the disk, if its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
