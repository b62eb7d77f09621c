"""The stderr of agents and conductor, which is the job's output: a file, perhaps on a full disk."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Final

PREFIX: Final = "clusterrun: "  # as the scripts begin a line for the user


def say_on_stderr(text: str) -> None:
    """Print a line, if that can be: nobody may end for want of words."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201


def print_trouble() -> None:
    """Print the traceback of the error at hand, if that can be."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
