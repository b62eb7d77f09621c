"""How a run ended: `end.json`."""

from __future__ import annotations

import json
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
    data = {
        "schema": SCHEMA,
        "state": state.value,
        "exit_code": exit_code,
        "ended_at": time.time(),
    }
    files.write_whole(paths.end, json.dumps(data) + "\n")


def read_end(paths: RunPaths) -> End | None:
    """Read end.json; None if it is missing, damaged or older than the newest attempt."""
    try:
        ended_ns = paths.end.stat().st_mtime_ns
    except OSError:
        return None
    return None if _begun_after(paths, ended_ns) else reading.read(paths.end, End, SCHEMA)


def _begun_after(paths: RunPaths, ended_ns: int) -> bool:
    """Return whether an attempt began later; both times are the file server's."""
    try:
        return paths.attempts_dir.stat().st_mtime_ns > ended_ns
    except OSError:
        return False
