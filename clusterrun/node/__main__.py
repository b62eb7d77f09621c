"""`python -m clusterrun.node agent RUN_DIR ATTEMPT HOST PORT`: node.sh executes this."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m clusterrun.node agent RUN_DIR ATTEMPT HOST PORT"


def main(argv: Sequence[str]) -> int:
    """Run the agent of a node; return its exit status."""
    if len(argv) == 5 and argv[0] == "agent" and argv[2].isdigit() and argv[4].isdigit():
        from clusterrun.node.agent.process import run_agent
        from clusterrun.node.link.member import Place

        return run_agent(Path(argv[1]), int(argv[2]), Place(argv[3], int(argv[4])))
    print(USAGE, file=sys.stderr)  # noqa: T201 - the node's part of the job's output
    return 2


if __name__ == "__main__":
    gc.freeze()  # node.sh has disabled collections while it imports
    gc.enable()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter's own end takes as long as its start
