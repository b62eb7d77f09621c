"""Decide which process continues a run: the first to write `owner` has the attempt."""

from __future__ import annotations

import contextlib
import time

from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files


def take_attempt(paths: RunPaths, number: int, owner: str) -> bool:
    """Take an attempt; return False if another process has it. Raises OSError.

    The directory does not show who created it: NFS repeats a mkdir whose answer was lost, and then
    reports EEXIST. The file `owner` does.
    """
    paths.attempt(number).mkdir(mode=0o700, exist_ok=True)
    try:
        printed = files.size_of(paths.batch_output)
        files.create(paths.owner(number), f"{owner}\n{printed}\n{time.time():.3f}\n")
    except FileExistsError:
        return False
    return True


def printed_before(paths: RunPaths, attempt: int) -> int:
    """Return the size of the batch output when an attempt began; 0 if unknown.

    The file holds what all attempts and jobs of a run printed.
    """
    size = _owner_line(paths, attempt, 1)
    return int(size) if size.isdecimal() else 0


def taken_at(paths: RunPaths, attempt: int) -> float | None:
    """Return when an attempt was taken, in epoch seconds; None if unknown."""
    with contextlib.suppress(ValueError):
        return float(_owner_line(paths, attempt, 2))
    return None


def _owner_line(paths: RunPaths, attempt: int, number: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        lines = files.read_whole(paths.owner(attempt)).decode().strip().split("\n")
        return "".join(lines[number : number + 1])
    return ""


def followed_by(paths: RunPaths, attempt: int, owner: str) -> str:
    """Say that another process has begun a later attempt; "" if none has."""
    newest = 0
    with contextlib.suppress(OSError):
        newest = paths.newest_attempt()
    if attempt and newest > attempt and _owner_line(paths, newest, 0) not in ("", owner):
        return f"attempt {newest} of this run has begun elsewhere"
    return ""
