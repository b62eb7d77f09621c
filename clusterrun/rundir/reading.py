"""The files of a run: dataclasses as JSON, which others may have written or damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files
from clusterrun.shared.typed import of_schema

_Result = TypeVar("_Result")


def read(path: Path, kind: type[_Result], schema: str) -> _Result | None:
    """Read a file of JSON as a value of a dataclass; None if it is missing or damaged."""
    data = files.read_json(path)
    try:
        return None if data is None else of_schema(kind, data, schema)
    except ValueError:
        files.note_damage(path)
        return None


def as_text(value: Any, schema: str) -> str:
    """Return the text of a file that `read` reads."""
    data = {"schema": schema, **dataclasses.asdict(value)}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def read_plan(paths: RunPaths) -> Plan:
    """Read the plan of a run. Raises OSError, and ValueError for that of another version."""
    try:
        return Plan.from_json(files.read_whole(paths.plan))
    except (ValueError, RecursionError) as error:
        files.note_damage(paths.plan)
        raise ValueError(f"plan.json does not fit this version of clusterrun: {error}") from error
