"""`python -m clusterrun.backends`: what batch scripts call."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterrun.errors import ClusterrunError

USAGE = """\
usage: python -m clusterrun.backends register RUN_DIR
       python -m clusterrun.backends superseded RUN_DIR
       python -m clusterrun.backends successor RUN_DIR [NODES]"""


def main(argv: Sequence[str]) -> int:
    """Record a run, so that it can be found like any other, or submit its next job.

    `superseded` says yes where another job has gone on with the run after this one.
    """
    match argv:
        case ["register", run_dir]:
            from clusterrun.record import register_run

            register_run(Path(run_dir), os.environ)
        case ["superseded", run_dir]:
            return _superseded(Path(run_dir))
        case ["successor", run_dir, *nodes] if len(nodes) <= 1:
            return _successor(Path(run_dir), "".join(nodes))
        case _:
            print(USAGE, file=sys.stderr)  # noqa: T201 - the batch script's output
            return 2
    return 0


def _superseded(run_dir: Path) -> int:
    from clusterrun.paths import RunPaths
    from clusterrun.record import read

    try:
        record = read(RunPaths(root=run_dir))
    except ClusterrunError:
        return 1
    is_followed = os.environ.get("SLURM_JOB_ID", "") in record.earlier_job_ids
    print("yes" if is_followed else "no")  # noqa: T201 - a setup line may choose the status
    return 0


def _successor(run_dir: Path, nodes: str) -> int:
    """Print the id of the job that goes on; a refusal is one line of the batch script's output."""
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
