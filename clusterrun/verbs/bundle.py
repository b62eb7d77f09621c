"""Pack what explains a failure into one archive that can be given to others, without secrets.

A run keeps a checksum of each value that it was passed by name, made with a key that only the
user's own state contains: without the key, no value can be found by guessing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clusterrun.config.secrets import is_secret, redacted
from clusterrun.errors import ClusterrunError
from clusterrun.rundir import attempt as attempts
from clusterrun.rundir import reading
from clusterrun.rundir.known_roots import state_dir
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import files

MOST_BYTES: Final = 256 * 1024  # of a file: its last part
MOST_NODES: Final = 64  # whose logs are packed
_KEY_BYTES: Final = 32
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
    import io
    import tarfile  # slow to import, and `submit` needs neither

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
    of_run = (paths.env_script, paths.record)
    outputs = [paths.end, paths.batch_output, paths.outcome(attempt)]
    for kind in (
        paths.log_errors(attempt, "any").parent.glob("*.err"),
        paths.events_dir.glob("*.jsonl"),
        paths.rank_errors(attempt, "any").parent.glob("*.jsonl"),
    ):
        blamed = verdict.get("nodes", ())  # they come first
        outputs += sorted(kind, key=lambda path: (path.stem not in blamed, path.name))[:MOST_NODES]
    record = replace(attempts.read_attempt(paths, attempt), secret="")
    name = paths.attempt_record(attempt).relative_to(paths.root).as_posix()
    yield name, reading.as_text(record, attempts.SCHEMA)
    for path in (*configuration, *of_run, *(outputs if with_output else ())):
        data = files.end_of(path, MOST_BYTES)
        data = data[data.find(b"\n") + 1 :] if len(data) == MOST_BYTES else data  # whole lines
        if data:
            yield path.relative_to(paths.root).as_posix(), data.decode("utf-8", "replace")


# Values passed by name


def passed_names(paths: RunPaths) -> list[str]:
    """Return the variables of `pass_env`."""
    names = (files.read_json(paths.plan) or {}).get("pass_env", ())
    return [name for name in names if isinstance(name, str)]


def note_passed(paths: RunPaths) -> None:
    """Add a line with the checksums of what a job is passed; without it, values are unknown."""
    if names := passed_names(paths):
        with contextlib.suppress(OSError):
            lines = files.read_whole(paths.passed) if paths.passed.exists() else b""
            noted = {name: _checksum(paths, name) for name in names}
            files.write_whole(paths.passed, lines + json.dumps(noted).encode() + b"\n")


def unknown_names(paths: RunPaths) -> list[str]:
    """Return the variables whose value this shell lacks, or that had another in one of the jobs."""
    try:
        lines = files.read_whole(paths.passed).splitlines()
        jobs = [files.parse_object(line) or {} for line in lines]
        noted = {name: {job.get(name) for job in jobs} for name in passed_names(paths)}
        return [name for name, found in noted.items() if found != {_checksum(paths, name)}]
    except (OSError, TypeError):
        return passed_names(paths)


def _checksum(paths: RunPaths, name: str) -> str:
    text = "\0".join((paths.root.name, name, os.environ.get(name, "")))
    return hmac.new(_key(), os.fsencode(text), "sha256").hexdigest()


def _key() -> bytes:
    path = state_dir() / "key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if files.size_of(path) != _KEY_BYTES:  # of a full disk: with an empty key, all can guess
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        files.create(path, secrets.token_bytes(_KEY_BYTES))
    return files.read_whole(path)
