"""An attempt, from its begin to its world: `attempts/<n>/attempt.json`.

Only the conductor writes it. The first process to do so has the attempt, and continues the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, replace
from typing import Any

from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

SCHEMA = "clusterrun.attempt/1"
MOST_RANKS = 1 << 12  # of a node


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """What is known of an attempt before its end."""

    owner: str = ""  # the process that took it
    taken_at: float | None = None  # epoch seconds
    printed: int = 0  # bytes that the batch output, which all attempts share, had at that time
    secret: str = ""  # known to the agents of the attempt
    nodes: tuple[str, ...] = ()  # in rank order, () until the rendezvous
    procs_per_node: int = 0
    resumed: int | None = None  # the step from which the script first resumed; 0 is the beginning

    @property
    def ranks_by_node(self) -> dict[str, range]:
        """The ranks of each node."""
        procs = self.procs_per_node
        return {node: range(i * procs, (i + 1) * procs) for i, node in enumerate(self.nodes)}


def take_attempt(paths: RunPaths, number: int, owner: str) -> bool:
    """Take an attempt for the process `owner`; return False if another has it. Raises OSError.

    The directory does not show who created it: NFS repeats a mkdir whose answer was lost, and then
    reports EEXIST. The record does.
    """
    paths.attempt(number).mkdir(mode=0o700, exist_ok=True)
    record = AttemptRecord(
        owner=owner,
        taken_at=round(time.time(), 3),
        printed=files.size_of(paths.batch_output),  # so far: all attempts share it
        secret=os.urandom(32).hex(),
    )
    try:
        files.create(paths.attempt_record(number), reading.as_text(record, SCHEMA))
    except FileExistsError:
        return False
    return True


def amend_attempt(paths: RunPaths, number: int, **changes: Any) -> None:
    """Change fields of an attempt's record. Raises OSError, also for one that can't be read."""
    path, record = paths.attempt_record(number), read_attempt(paths, number)
    if record == AttemptRecord() and path.exists():  # what it holds must not be lost
        raise OSError(errno.EIO, "it can't be read", str(path))
    files.write_whole(path, reading.as_text(replace(record, **changes), SCHEMA))


def read_attempt(paths: RunPaths, number: int) -> AttemptRecord:
    """Return an attempt's record; an empty one if it is missing or damaged."""
    path = paths.attempt_record(number)
    found = reading.read(path, AttemptRecord, SCHEMA) or AttemptRecord()
    is_sound = 0 <= found.procs_per_node <= MOST_RANKS and found.printed >= 0
    if not is_sound or any("/" in node for node in found.nodes):  # a node's name is part of paths
        files.note_damage(path)
        return AttemptRecord()
    return found


def followed_by(paths: RunPaths, attempt: int, owner: str) -> str:
    """Say that a process other than `owner` began an attempt after `attempt`; "" if none did."""
    newest = 0
    with contextlib.suppress(OSError):
        newest = paths.newest_attempt()
    later_owner = read_attempt(paths, newest).owner if 0 < attempt < newest else ""  # 0: none yet
    if later_owner not in ("", owner):  # "": no later attempt, or its owner is not known
        return f"attempt {newest} of this run has begun elsewhere"
    return ""
