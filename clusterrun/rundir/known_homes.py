"""Remember which runs of this user are on another host; what a run directory says is not enough.

Whoever copies a project here would otherwise name a host, and the program that runs there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterrun.errors import NotAdoptedError
from clusterrun.rundir.known_roots import state_dir
from clusterrun.rundir.record import Home, JobRecord
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.locks import locked
from clusterrun.shared.typed import decoded

REMEMBERED: Final = 1000


def remember_home(record: JobRecord) -> None:
    """Remember the home that a record names, if any. Raises OSError and ClusterrunError."""
    if record.home is None:
        return
    path = _file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        homes = known_homes()
        homes.pop(key := _key(record), None)
        newest: dict[str, Any] = {key: dataclasses.asdict(record.home)}
        for run, home in [*homes.items()][: REMEMBERED - 1]:
            newest[run] = dataclasses.asdict(home)
        write_whole(path, json.dumps({"homes": newest}) + "\n")


def known_homes() -> dict[str, Home]:
    """Return the homes by the run directories here, the last remembered first."""
    try:
        found: dict[str, Home] = decoded(dict[str, Home], (read_json(_file()) or {}).get("homes"))
    except ValueError:
        return {}
    return found


def adopted(record: JobRecord, known: Mapping[str, Home]) -> JobRecord:
    """Return a record with the home of the run. Raises NotAdoptedError if only job.json has one."""
    if record.home is None:
        return record
    home = known.get(_key(record))
    if home is None:
        word = record.job_id or shlex.quote(record.run_dir)
        raise NotAdoptedError(record.home.host, record.home.python, word)
    return dataclasses.replace(record, home=home)


def _key(record: JobRecord) -> str:
    return os.path.realpath(record.run_dir)


def _file() -> Path:
    return state_dir() / "homes.json"
