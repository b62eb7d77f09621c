"""Remember between commands where this user has runs; what a run directory says is not believed.

Otherwise a copied project could name a host, and the program that runs there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
from pathlib import Path

from clusterrun.errors import NotAdoptedError
from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.record import Home, JobRecord
from clusterrun.shared.files import read_json, write_whole

REMEMBERED_ROOTS = 50
HOME_SCHEMA = "clusterrun.home/1"


def remember_root(runs_dir: RunsDir) -> None:
    """Remember a directory of runs, so that commands work from elsewhere; ignore write errors."""
    root = str(runs_dir.root.absolute())
    roots = dict.fromkeys((root, *(str(known.root) for known in remembered_roots())))
    path = _roots_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps({"roots": [*roots][:REMEMBERED_ROOTS]}) + "\n")


def remembered_roots() -> list[RunsDir]:
    """Return the remembered directories of runs that still exist, the last used first."""
    try:
        roots = (read_json(_roots_file()) or {})["roots"]
        return [RunsDir(root=Path(root)) for root in roots if Path(root).is_dir()]
    except (OSError, KeyError, TypeError):
        return []


def remember_home(record: JobRecord) -> None:
    """Remember the home that a record names, if any. Raises OSError."""
    if record.home:
        path = _home_file(record)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, reading.as_text(record.home, HOME_SCHEMA))


def adopted(record: JobRecord) -> JobRecord:
    """Return a record with the home of the run. Raises NotAdoptedError if only job.json has one."""
    if record.home is None:
        return record
    home = reading.read(_home_file(record), Home, HOME_SCHEMA)
    if home is None:
        word = record.job_id or shlex.quote(record.run_dir)
        raise NotAdoptedError(
            f"job {word} is elsewhere, on {record.home.host}, but only its job.json says so",
            hint=f"if you trust it to run {record.home.python} there: "
            f"clusterrun status --adopt {word}",
        )
    return dataclasses.replace(record, home=home)


def _home_file(record: JobRecord) -> Path:
    place = os.fsencode(os.path.realpath(record.run_dir))
    return state_dir() / "homes" / f"{hashlib.sha256(place).hexdigest()[:32]}.json"


def _roots_file() -> Path:
    return state_dir() / "roots.json"


def state_dir() -> Path:
    """Return the directory for state that clusterrun keeps between commands."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "clusterrun"
