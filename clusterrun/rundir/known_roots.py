"""Where this user has runs, remembered between commands."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from clusterrun.rundir.paths import RunsDir
from clusterrun.shared.files import read_json, write_whole

REMEMBERED_ROOTS = 50


def remember_root(runs_dir: RunsDir, environ: Mapping[str, str] = os.environ) -> None:
    """Remember where this user has runs, so that commands work from elsewhere; best effort."""
    root = str(runs_dir.root.absolute())
    roots = [root, *(str(known.root) for known in remembered_roots(environ))]
    path = _roots_file(environ)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(
            path, json.dumps({"roots": list(dict.fromkeys(roots))[:REMEMBERED_ROOTS]}) + "\n"
        )


def remembered_roots(environ: Mapping[str, str] = os.environ) -> list[RunsDir]:
    """Return the places of runs, the last used first; those that are gone are left out."""
    try:
        roots = (read_json(_roots_file(environ)) or {})["roots"]
        return [RunsDir(root=Path(root)) for root in roots if Path(root).is_dir()]
    except (OSError, KeyError, TypeError):
        return []


def _roots_file(environ: Mapping[str, str]) -> Path:
    return state_dir(environ) / "roots.json"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Name the directory for what clusterrun remembers between commands."""
    base = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "clusterrun"
