"""The request to interrupt an attempt: one word in `attempts/<n>/request`."""

from __future__ import annotations

import contextlib
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
