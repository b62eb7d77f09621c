"""How a run ended: the state of its newest attempt, in end.json."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files
from clusterrun.shared.state import JobState

SCHEMA = "clusterrun.end/1"


@dataclass(frozen=True, kw_only=True)
class End:
    """How the newest attempt ended."""

    state: JobState
    exit_code: int | None = None
    ended_at: float | None = None


def write_end(paths: RunPaths, state: JobState, exit_code: int) -> None:
    """Write end.json atomically, readable by its owner only. Raises OSError."""
    end = End(state=state, exit_code=exit_code, ended_at=time.time())
    files.write_whole(paths.end, reading.as_text(end, SCHEMA))


def read_end(paths: RunPaths) -> End | None:
    """Read end.json; None if it is missing, damaged or older than the newest attempt."""
    begun_ns = 0
    with contextlib.suppress(OSError):
        begun_ns = paths.attempts_dir.stat().st_mtime_ns  # set by the newest attempt's directory
    with contextlib.suppress(OSError):
        is_newer = paths.end.stat().st_mtime_ns >= begun_ns  # both times are the file server's
        # A copied run has other times; an outcome shows as well that the attempt has ended.
        if is_newer or paths.outcome(paths.newest_attempt()).exists():
            return reading.read(paths.end, End, SCHEMA)
    return None
