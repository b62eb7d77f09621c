"""Requests in an attempt's directory: to interrupt it, and to show where its ranks are.

The first is one word in `request`, the others are the files `look-<id>.<what>`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from clusterrun.rundir.outcome import Reason as Reason
from clusterrun.shared import files


def read_request(path: Path) -> Reason | None:
    """Return why an attempt is to be interrupted; None if there is no request."""
    try:
        return Reason(files.read_whole(path).decode("ascii").strip())
    except (OSError, ValueError):
        return None


def write_request(path: Path, reason: Reason) -> None:
    """Request an interruption; the first request is kept, but END replaces any other."""
    write = files.write_whole if reason is Reason.END else files.create
    with contextlib.suppress(OSError):  # FileExistsError: another request was first
        write(path, f"{reason.value}\n")


STACKS, DUMPS = ".stacks", ".fr"
_PREFIX = "look-"


def request_look(directory: Path, *, with_dumps: bool) -> Path:
    """Request a look at the ranks; return the request's path. Raises OSError."""
    name = f"{_PREFIX}{secrets.token_hex(4)}{DUMPS if with_dumps else STACKS}"
    (path := directory / name).touch(mode=0o600)
    return path


def requests(directory: Path) -> list[Path]:
    """List the requests in an attempt's directory."""
    names = [name for name in os.listdir(directory) if name.startswith(_PREFIX)]
    return [directory / name for name in sorted(names) if name.endswith((STACKS, DUMPS))]


def answer_path(request: Path) -> Path:
    """Return where a request is answered."""
    return request.with_suffix(".json")
