"""Signal the controller of a job from another machine: `tell RUN_DIR JOB_ID SIGNAL`."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterrun.backends.local.backend import LocalBackend
from clusterrun.rundir.paths import RunPaths, RunsDir


def main() -> int:
    """Send the signal."""
    run_dir, job_id, number = sys.argv[1:]
    paths = RunPaths(root=Path(run_dir))
    LocalBackend(runs_dir=RunsDir(root=paths.root.parent.parent)).signal(job_id, int(number))
    return 0


if __name__ == "__main__":
    sys.exit(main())
