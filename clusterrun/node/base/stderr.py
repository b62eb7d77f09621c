"""The stderr of agents and conductor: the job's output, perhaps a file on a full disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Final

PREFIX: Final = "clusterrun: "  # as the scripts begin a line for the user


def say_on_stderr(text: str) -> None:
    """Print a line, if the disk takes it."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201


def print_trouble() -> None:
    """Print the traceback of the current error, if the disk takes it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
