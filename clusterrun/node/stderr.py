"""The agent's stderr, which the batch script shows: it may be a file on a full disk."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

PREFIX: Final = "clusterrun: "  # as the scripts begin a line for the user


def say_on_stderr(text: str) -> None:
    """Print a line, if that can be: nobody may end for want of words."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201
