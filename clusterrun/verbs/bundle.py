"""Pack what explains a failure into one archive that can be given to others, without secrets."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from clusterrun.config.secrets import redacted
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.files import end_of, read_json

MOST_BYTES: Final = 256 * 1024  # of a file: its last part
MOST_NODES: Final = 64  # whose logs are packed
_LEAST_LETTERS: Final = 6  # of a value that is searched for; shorter ones are words


def write_bundle(target: Path, record: JobRecord, attempt: int, answer: Mapping[str, Any]) -> int:
    """Write a `.tgz` of a run's diagnosis, records, configuration and errors; return its files.

    Of many nodes, those of the verdict come first. The values of variables that were passed by name
    are removed. Raises ClusterrunError if `target` exists or cannot be written.
    """
    values = _passed(record)
    names = set()
    try:
        with target.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            os.fchmod(file.fileno(), 0o600)
            for name, text in _texts(record.paths, attempt, answer):
                data = _without(values, text).encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{record.name}-{record.run_id}/{name}")
                entry.size, entry.mode = len(data), 0o600
                archive.addfile(entry, io.BytesIO(data))
                names.add(name)
    except OSError as error:
        raise ClusterrunError(
            f"cannot write {target}", cause=error.strerror or "", hint="name another file"
        ) from error
    return len(names)


def _without(values: Mapping[str, str], text: str) -> str:
    """Remove values, the longest first: one may begin like another. JSON escapes some letters."""
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        for form in (value, json.dumps(value)[1:-1]):
            text = text.replace(form, f"[{name}]")
    return redacted(text)


def _passed(record: JobRecord) -> dict[str, str]:
    plan = read_json(record.paths.plan) or {}
    found = {name: os.environ.get(name, "") for name in plan.get("pass_env", ())}
    return {name: value for name, value in found.items() if len(value) >= _LEAST_LETTERS}


def _texts(paths: RunPaths, attempt: int, answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "diagnosis.json", json.dumps(answer, indent=2) + "\n"
    # Not the other scripts: job.sbatch contains all these files.
    configuration = (paths.resolved, paths.plan, paths.accelerate, paths.deepspeed)
    of_run = (paths.env_script, paths.record, paths.end, paths.batch_output)
    of_attempt = (paths.outcome(attempt), paths.world(attempt))
    nodes = (answer["verdict"] or {}).get("nodes", ())
    of_nodes = (
        *_first(paths.log_errors(attempt, "any").parent.glob("*.err"), nodes),
        *_first(paths.events_dir.glob("*.jsonl"), nodes),
        *_first(paths.rank_errors(attempt, "any").parent.glob("*.jsonl"), nodes),
    )
    for path in (*configuration, *of_run, *of_attempt, *of_nodes):
        if data := end_of(path, MOST_BYTES):
            yield path.relative_to(paths.root).as_posix(), data.decode("utf-8", "replace")


def _first(files: Iterable[Path], nodes: Collection[str]) -> list[Path]:
    return sorted(files, key=lambda path: (path.stem not in nodes, path.name))[:MOST_NODES]
