"""`python -m clusterrun.backends register RUN_DIR`: what a script submitted by hand calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m clusterrun.backends register RUN_DIR"


def main(argv: Sequence[str]) -> int:
    """Record the run, so that it can be found like any other."""
    if len(argv) != 2 or argv[0] != "register":
        print(USAGE, file=sys.stderr)  # noqa: T201 - the batch script's output
        return 2
    from clusterrun.record import register_run

    register_run(Path(argv[1]), os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
