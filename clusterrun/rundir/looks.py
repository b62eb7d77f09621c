"""Requests to show where the ranks of a running attempt are: `attempts/<n>/look-<id>.<what>`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

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
