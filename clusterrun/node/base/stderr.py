"""Print to stderr, which is the job's output and may be a file on a full disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Final

PREFIX: Final = "clusterrun: "  # also in the scripts


def say_on_stderr(text: str) -> None:
    """Print a line; ignore a full disk."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201


def print_trouble() -> None:
    """Print the traceback of the current error; ignore a full disk."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
