"""Read the files of a run, which another program, version or person may have damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

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
