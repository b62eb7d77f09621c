"""Tell whether this shell has the values that a run was passed by name, without storing them.

A run keeps a checksum of each value, made with a key that only the user's own state contains:
without the key, no value can be found by guessing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from typing import Final

from clusterrun.rundir.known_roots import state_dir
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

_KEY_BYTES: Final = 32


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
