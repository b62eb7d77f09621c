"""The process that a batch script becomes: the conductor of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from clusterrun.node.conductor.host import Signals
from clusterrun.shared.given import before_setup


def main(argv: Sequence[str]) -> int:
    """Run the conductor of a batch script, in the environment that Slurm gave the job.

    `argv`: run directory, kind (see SlurmHost), the directory that the script started in, the file
    descriptor of this environment, for how many seconds the script has run, its srun command.
    """
    signals = Signals()  # first: a signal must not be lost or end the job
    from clusterrun.backends.slurm.host import SlurmHost
    from clusterrun.node.base.stderr import print_trouble
    from clusterrun.node.conductor.agents import Agents
    from clusterrun.node.conductor.conductor import Conductor
    from clusterrun.rundir.end import write_end
    from clusterrun.rundir.paths import RunPaths
    from clusterrun.rundir.reading import read_plan
    from clusterrun.shared.state import JobState

    run_dir, kind, directory, environ_fd, seconds, *srun = argv
    before = before_setup(int(environ_fd))
    os.environ.clear()  # each node's task runs the setup lines again
    os.environ.update(before)
    try:
        os.chdir(directory)
    except OSError:
        os.chdir("/")
    paths = RunPaths(root=Path(run_dir))
    try:
        plan = read_plan(paths)
    except (OSError, ValueError):
        print_trouble()
        write_end(paths, JobState.FAILED, 1)
        return 1
    host = SlurmHost(paths, plan, kind=kind, started=time.monotonic() - int(seconds), srun=srun)
    agents = Agents(paths, plan, host.job_id, signals.wake)
    code = Conductor(paths=paths, plan=plan, host=host, hear=signals.wait, agents=agents).run()
    signals.ignore()
    return code
