"""Pack what explains a failure into one archive that can be given to others, without secrets."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from clusterrun.config.secrets import is_secret, redacted
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.files import end_of
from clusterrun.verbs.passed import passed_names, unknown_names

MOST_BYTES: Final = 256 * 1024  # of a file: its last part
MOST_NODES: Final = 64  # whose logs are packed
_LEAST_LETTERS: Final = 6  # of a value that is searched for; shorter ones are words
_NO_TEXTS: Final = ("class", "role", "domain", "status", "ranks", "nodes", "retry")  # of a verdict


def write_bundle(
    target: Path, record: JobRecord, attempt: int, answer: Mapping[str, Any]
) -> tuple[int, list[str]]:
    """Write a `.tgz` of a run's diagnosis, records, configuration and errors.

    Return the number of its files, and the variables for which it has no texts of the script: they
    were passed by name, and this shell may not have their values.

    Of many nodes, those of the verdict come first. The values of variables that were passed by name
    are removed from it. Raises ClusterrunError if `target` exists or cannot be written.
    """
    found, unknown = passed_names(record.paths), unknown_names(record.paths)
    values = {name: os.environ.get(name, "") for name in found}
    names = set()
    try:
        with target.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            os.fchmod(file.fileno(), 0o600)
            for name, text in _texts(record.paths, attempt, answer, with_output=not unknown):
                data = _without(values, text).encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{record.name}-{record.run_id}/{name}")
                entry.size, entry.mode = len(data), 0o600
                archive.addfile(entry, io.BytesIO(data))
                names.add(name)
    except OSError as error:
        raise ClusterrunError(
            f"cannot write {target}", cause=error.strerror or "", hint="name another file"
        ) from error
    return len(names), unknown


def _without(values: Mapping[str, str], text: str) -> str:
    """Remove values, the longest first: one may begin like another. JSON escapes some letters."""
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        if len(value) < _LEAST_LETTERS and not is_secret(name, value):
            continue
        for form in (value, json.dumps(value)[1:-1]):
            text = text.replace(form, f"[{name}]")
    return redacted(text)


def _texts(
    paths: RunPaths, attempt: int, answer: Mapping[str, Any], *, with_output: bool
) -> Iterator[tuple[str, str]]:
    verdict = answer["verdict"] or {}
    shown = answer if with_output else {"verdict": {n: verdict.get(n) for n in _NO_TEXTS}}
    yield "diagnosis.json", json.dumps(shown, indent=2) + "\n"
    # Not the other scripts: job.sbatch contains all these files.
    configuration = (paths.resolved, paths.plan, paths.accelerate, paths.deepspeed)
    of_run = (paths.env_script, paths.record, paths.world(attempt))
    outputs = [paths.end, paths.batch_output, paths.outcome(attempt)]
    for kind in (
        paths.log_errors(attempt, "any").parent.glob("*.err"),
        paths.events_dir.glob("*.jsonl"),
        paths.rank_errors(attempt, "any").parent.glob("*.jsonl"),
    ):
        blamed = verdict.get("nodes", ())  # they come first
        outputs += sorted(kind, key=lambda path: (path.stem not in blamed, path.name))[:MOST_NODES]
    for path in (*configuration, *of_run, *(outputs if with_output else ())):
        data = end_of(path, MOST_BYTES)
        data = data[data.find(b"\n") + 1 :] if len(data) == MOST_BYTES else data  # whole lines
        if data:
            yield path.relative_to(paths.root).as_posix(), data.decode("utf-8", "replace")
