"""`python -m clusterrun.backends successor RUN_DIR [NODES]`: what an heir calls on its node."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterrun.errors import ClusterrunError

USAGE = "usage: python -m clusterrun.backends successor RUN_DIR [NODES]"


def main(argv: Sequence[str]) -> int:
    """Print the id of the job that continues the run, or why there is none."""
    match argv:
        case ["successor", run_dir, *nodes] if len(nodes) <= 1:
            return _successor(Path(run_dir), "".join(nodes))
    print(USAGE, file=sys.stderr)  # noqa: T201 - the heir's log
    return 2


def _successor(run_dir: Path, nodes: str) -> int:
    from clusterrun.backends.successor import submit_successor

    try:
        print(submit_successor(run_dir, nodes, os.environ))  # noqa: T201
    except (ClusterrunError, OSError, ValueError) as error:
        cause = getattr(error, "cause", "") or ""
        text = ": ".join(filter(None, (str(error), " ".join(cause.split()))))
        print(f"clusterrun: no successor: {text}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
