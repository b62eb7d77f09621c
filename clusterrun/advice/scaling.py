"""Write the results of `clusterrun scaling` beside the runs, and find them for `plan`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final

from clusterrun.config import Resolved
from clusterrun.errors import ClusterrunError
from clusterrun.estimates.scaling import Point, Scaling
from clusterrun.rundir.paths import RunsDir
from clusterrun.shared import files
from clusterrun.shared.typed import of_schema

SCHEMA: Final = "clusterrun.scaling/1"


def to_object(scaling: Scaling) -> dict[str, Any]:
    """Return a result as JSON values, each point with its gain over the first."""
    return {"schema": SCHEMA, **dataclasses.asdict(scaling)} | {
        "points": [_point(scaling, point) for point in scaling.points]
    }


def _point(scaling: Scaling, point: Point) -> dict[str, Any]:
    gain = scaling.gain(point)
    return {
        **dataclasses.asdict(point),
        **dataclasses.asdict(gain),
        "communication": gain.communication,
    }


def store(path: Path, scaling: Scaling) -> None:
    """Write scaling.json whole, readable by its owner only. Raises ClusterrunError."""
    try:
        files.write_whole(path, json.dumps(to_object(scaling), indent=2) + "\n")
    except OSError as error:
        raise ClusterrunError(f"cannot write {path}", cause=str(error)) from error


def find(resolved: Resolved) -> tuple[Scaling, ...]:
    """Return the results for a configuration's script, the newest first."""
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        return ()
    runs_dir = RunsDir(root=Path(os.path.normpath(resolved.cwd / spec.run_dir)))
    found = [_read(path) for path in runs_dir.root.glob(f"*/{runs_dir.scaling('').name}")]
    own = [x for x in found if x is not None and x.script == script_of(resolved)]
    return tuple(sorted(own, key=lambda x: x.measured_at, reverse=True))


def script_of(resolved: Resolved) -> str:
    """Name what a configuration runs: the script's path, or `-m MODULE`."""
    spec = resolved.spec
    if spec.module is not None:
        return f"-m {spec.module}"
    return os.path.normpath(resolved.cwd / (spec.script or ""))


def _read(path: Path) -> Scaling | None:
    try:
        found = of_schema(Scaling, files.read_json(path), SCHEMA)
    except ValueError:
        return None
    return found if found.points else None
