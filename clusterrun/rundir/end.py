"""Why an attempt ends, the requests in its directory, and how the run ended (end.json).

The file `request` interrupts the attempt: it has one word. A file `look-<id>.fr` asks where the
ranks are.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files
from clusterrun.shared.state import JobState

END_SCHEMA = "clusterrun.end/1"


class Cause(str, Enum):
    """The kind of a failure, or of another end."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    WORLD = "world"
    WORLD_ELSEWHERE = "world_elsewhere"  # broken on a different node than the one that noticed
    ENGINE = "engine"  # the ranks would train with a different engine than requested
    LAUNCHER = "launcher"
    NODE_LOST = "node_lost"
    VANISHED = "vanished"  # no agent could write an outcome: the batch host was lost
    NODE_UNFIT = "node_unfit"
    PREFLIGHT = "preflight"  # a check of a node failed, and the launch waits for no such node
    RENDEZVOUS = "rendezvous"
    CANCELLED = "cancelled"
    HUNG = "hung"
    HALTED = "halted"  # hung without running: stopped, or blocked in the kernel
    INTERRUPTED = "interrupted"  # the ranks were to save and exit
    COMPLETED = "completed"

    @property
    def is_failure(self) -> bool:
        """Return whether something went wrong."""
        return self not in (Cause.COMPLETED, Cause.INTERRUPTED, Cause.CANCELLED)


class Reason(str, Enum):
    """Why an attempt is interrupted: the word in its `request`."""

    END = "end"
    CANCEL = "cancel"
    TIME_LIMIT = "time-limit"
    PREEMPT = "preempt"
    SIGNAL = "signal"  # the warning signal of the time limit, when the limit is not near

    @property
    def text(self) -> str:
        """The reason for people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.END: "cancelled",
    Reason.CANCEL: "cancelled, after a checkpoint",
    Reason.TIME_LIMIT: "the time limit",
    Reason.PREEMPT: "preempted",
    Reason.SIGNAL: "a warning signal (SIGUSR1 or SIGUSR2)",
}


def read_request(path: Path) -> Reason | None:
    """Return why an attempt is to be interrupted; None if there is no request."""
    try:
        return Reason(files.read_whole(path).decode("ascii").strip())
    except (OSError, ValueError):
        return None


def write_request(path: Path, reason: Reason) -> None:
    """Request an interruption; keep an earlier request, unless the new one is END."""
    write = files.write_whole if reason is Reason.END else files.create
    with contextlib.suppress(OSError):  # FileExistsError: another request was first
        write(path, f"{reason.value}\n")


def request_look(directory: Path) -> Path:
    """Request a look at the ranks; return the request's path. Raises OSError."""
    (path := directory / f"look-{os.urandom(4).hex()}.fr").touch(mode=0o600)
    return path


def requests(directory: Path) -> list[Path]:
    """List the requests in an attempt's directory."""
    return sorted(directory.glob("look-*.fr"))


def answer_path(request: Path) -> Path:
    """Return where a request is answered."""
    return request.with_suffix(".json")


@dataclass(frozen=True, kw_only=True)
class End:
    """How the newest attempt ended."""

    state: JobState
    exit_code: int | None = None
    ended_at: float | None = None


def write_end(paths: RunPaths, state: JobState, exit_code: int) -> None:
    """Write end.json atomically, readable by its owner only. Raises OSError."""
    end = End(state=state, exit_code=exit_code, ended_at=time.time())
    files.write_whole(paths.end, reading.as_text(end, END_SCHEMA))


def read_end(paths: RunPaths) -> End | None:
    """Read end.json; None if it is missing, damaged or older than the newest attempt."""
    begun_ns = 0
    with contextlib.suppress(OSError):
        begun_ns = paths.attempts_dir.stat().st_mtime_ns  # set by the newest attempt's directory
    with contextlib.suppress(OSError):
        is_newer = paths.end.stat().st_mtime_ns >= begun_ns  # both times are the file server's
        # A copied run has other times; an outcome shows as well that the attempt has ended.
        if is_newer or paths.outcome(paths.newest_attempt()).exists():
            return reading.read(paths.end, End, END_SCHEMA)
    return None
