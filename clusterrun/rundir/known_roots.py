"""Remember between commands where this user has runs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from clusterrun.rundir.paths import RunsDir
from clusterrun.shared.files import read_json, write_whole

REMEMBERED_ROOTS = 50


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


def _roots_file() -> Path:
    return state_dir() / "roots.json"


def state_dir() -> Path:
    """Return the directory for state that clusterrun keeps between commands."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "clusterrun"
