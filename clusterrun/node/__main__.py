"""`python -m clusterrun.node agent RUN_DIR ATTEMPT` or `… register RUN_DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m clusterrun.node agent RUN_DIR ATTEMPT | register RUN_DIR"


def main(argv: Sequence[str]) -> int:
    """Do what the batch script asks for on a node."""
    if len(argv) == 3 and argv[0] == "agent" and argv[2].isdigit():
        from clusterrun.node.agent import run_agent

        return run_agent(Path(argv[1]), int(argv[2]))
    if len(argv) == 2 and argv[0] == "register":
        return _register(Path(argv[1]))
    print(USAGE, file=sys.stderr)  # noqa: T201 - the batch script's log
    return 2


def _register(run_dir: Path) -> int:
    """Record a run that was submitted by hand; its record belongs to a room above this one."""
    import importlib
    import os

    importlib.import_module("clusterrun.record").register_run(run_dir, os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
