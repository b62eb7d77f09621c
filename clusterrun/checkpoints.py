"""Checkpoints on disk: which are complete, which is the newest, which may go.

A checkpoint is a directory `step-00000100`, or `checkpoint-100` as Hugging Face's Trainer names it.
It is complete once it holds a valid `.complete`, written last of all, which lists every file with
its size and checksum. Whatever cuts a save short leaves something that is passed over.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = "clusterrun.checkpoint/1"
MARKER = ".complete"
WHOLE_BYTES = 64 << 20  # larger files are sampled: nobody waits for terabytes to be read
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_CHUNK = 1 << 20
_Result = TypeVar("_Result")
_THREADS = 8
_NAME = re.compile(r"(?:step|checkpoint)-(\d+)", re.ASCII)
_UNFINISHED = re.compile(r"\.step-\d+\.a\d+\.tmp", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint; `settings` is what the script said about itself when it saved."""

    path: Path
    step: int
    world_size: int
    attempt: int
    saved_at: float
    settings: Mapping[str, Any]

    def difference(self, world_size: int, settings: Mapping[str, Any]) -> str:
        """Say how this world and its settings differ from those that saved; "" where they don't."""
        now = json.loads(json.dumps(dict(settings), default=str))
        words = [
            f"{name} was {self.settings.get(name)} and is {now.get(name)}"
            for name in sorted({*self.settings, *now})
            if self.settings.get(name) != now.get(name)
        ]
        if self.world_size != world_size:
            words.append(f"it was saved by {self.world_size} ranks and these are {world_size}")
        return "; ".join(words)


def step_directory(directory: Path, step: int) -> Path:
    """Return where the complete checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def unfinished_directory(directory: Path, step: int, attempt: int) -> Path:
    """Return where the checkpoint of a step lies while it is written."""
    return directory / f".step-{step:08d}.a{attempt}.tmp"


def newest(directory: Path, *, up_to: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint, and a line about each newer one that is not.

    None beyond step `up_to` is looked at.
    """
    notes: list[str] = []
    for step, path in _found(directory):
        if up_to is not None and step > up_to:
            continue
        try:
            return _read(path), notes
        except _Incomplete as problem:
            notes.append(f"checkpoint {path.name} is incomplete and passed over: {problem}")
    return None, notes


def listed(directory: Path) -> list[tuple[int, Path, str]]:
    """List step, path and what is wrong ("": nothing) of all checkpoints, newest first."""
    return [(step, path, _problem(path)) for step, path in _found(directory)]


def check_room(directory: Path) -> None:
    """Raise OSError where the disk has less room than the newest complete checkpoint takes.

    It is better found before: in the midst of a save, a rank that fails alone leaves the others
    waiting in the collectives of DeepSpeed and FSDP.
    """
    whole = (path for _, path in _found(directory) if not _problem(path, contents=False))
    last = next(whole, None)
    if last is None:
        return
    needed = sum((last / name).stat().st_blocks * 512 for name in _files(last))
    free = shutil.disk_usage(directory).free
    if free < needed:
        words = f"{needed >> 20} MiB are needed, {free >> 20} MiB are free"
        raise OSError(errno.ENOSPC, words)


def mark(
    path: Path, step: int, *, world_size: int, attempt: int = 1, settings: Mapping[str, Any]
) -> None:
    """Write the marker of a checkpoint whose files are all there; they are on the disk before it.

    Raises OSError where the disk takes no more.
    """
    names = sorted(_files(path))
    sums = _at_once(lambda name: _settled(path / name), names)
    marker = {
        "schema": SCHEMA,
        "step": step,
        "world_size": world_size,
        "attempt": attempt,
        "saved_at": round(time.time(), 6),
        "settings": dict(settings),
        "files": dict(zip(names, sums, strict=True)),
    }
    temporary = path / f"{MARKER}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(marker, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / MARKER)
    _sync_directory(path)


def publish(unfinished: Path, final: Path) -> None:
    """Give a marked checkpoint its name; an older one of that name goes."""
    older = unfinished_directory(final.parent, 0, 0)
    with contextlib.suppress(FileNotFoundError):
        final.rename(older)
    unfinished.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(older, ignore_errors=True)


def prune(directory: Path, keep: int, *, up_to: int | None = None) -> None:
    """Remove what is older than the newest `keep` complete checkpoints.

    Those beyond step `up_to`, left by a training that was set back, are not counted and stay.
    Contents are not read: what is complete is said by markers and sizes.
    """
    found = [(step, path) for step, path in _found(directory) if up_to is None or step <= up_to]
    complete = [step for step, path in found if not _problem(path, contents=False)]
    for step, path in found:
        if complete and step < complete[:keep][-1]:
            shutil.rmtree(path)


def remove_unfinished(directory: Path) -> None:
    """Remove what saves that were cut short have left."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


class _Incomplete(Exception):
    """Why a checkpoint can't be used."""


def _found(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints by step, newest first, complete or not."""
    if not directory.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def _problem(path: Path, *, contents: bool = True) -> str:
    try:
        _read(path, contents=contents)
    except _Incomplete as problem:
        return str(problem)
    return ""


def _read(path: Path, *, contents: bool = True) -> Checkpoint:
    """Read the marker and hold the files to it."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in marker["files"].items()}
        found = Checkpoint(
            path=path,
            step=int(marker["step"]),
            world_size=int(marker["world_size"]),
            attempt=int(marker["attempt"]),
            saved_at=float(marker["saved_at"]),
            settings=dict(marker["settings"]),
        )
        if marker["schema"] != SCHEMA:
            raise _Incomplete(f"its {MARKER} is of another kind: {marker['schema']}")
    except FileNotFoundError:
        raise _Incomplete(f"it has no {MARKER}: it was never saved to its end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _Incomplete(f"its {MARKER} can't be read") from None
    for name, (size, _) in files.items():
        _check_size(path, name, size)
    if contents:
        _at_once(lambda name: _check_contents(path, name, files[name][1]), files)
    return found


def _check_size(path: Path, name: str, size: int) -> None:
    try:
        found = (path / name).stat().st_size
    except OSError:
        raise _Incomplete(f"{name} is missing") from None
    if found != size:
        raise _Incomplete(f"{name} has {found} bytes instead of {size}")


def _check_contents(path: Path, name: str, crc: int) -> None:
    try:
        found = _checksum(path / name)
    except OSError as error:
        raise _Incomplete(f"{name} can't be read: {error.strerror}") from None
    if found != crc:
        raise _Incomplete(f"{name} is damaged: its checksum is another than when it was saved")


def _at_once(deed: Callable[[str], _Result], names: Iterable[str]) -> list[_Result]:
    """Do something with several files at a time: a disk far away answers late."""
    from concurrent.futures import ThreadPoolExecutor  # brings `logging`: not at each start

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(deed, names))


def _files(path: Path) -> Iterator[str]:
    """Yield the names of all files below a checkpoint, but for the marker's."""
    for folder, _, names in os.walk(path):
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), path)
            if relative not in (MARKER, f"{MARKER}.tmp"):
                yield relative


def _settled(file: Path) -> tuple[int, int]:
    """Have a file on the disk; return its size and checksum."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size, _checksum(file)
    finally:
        os.close(descriptor)


def _checksum(file: Path) -> int:
    """Return the CRC-32 of a file; of a large one, that of blocks spread over it evenly."""
    crc = 0
    with open(file, "rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= WHOLE_BYTES:
            while chunk := opened.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
            return crc
        last = size - SAMPLE_BYTES
        for place in sorted({0, last, *(last * n // SAMPLES for n in range(SAMPLES))}):
            crc = zlib.crc32(os.pread(opened.fileno(), SAMPLE_BYTES, place), crc)
    return crc


def _sync_directory(path: Path) -> None:
    """Have the names within a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
