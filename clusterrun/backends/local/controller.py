"""Run one job of the local backend to its end: `controller RUN_DIR JOB_ID`.

The controller is the conductor's process, detached from the shell that submitted: what slurmd and
the batch script are on a cluster. It leaves no process behind.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from clusterrun.backends.local import process
from clusterrun.backends.local.host import LocalHost
from clusterrun.launch.plan import Plan
from clusterrun.node.agent.processes import adopt_orphans
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.signals import Signals
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole

SCHEMA = "clusterrun.controller/1"
READY = b"ready"


def conduct(paths: RunPaths, plan: Plan, job_id: str, ready: Callable[[], None]) -> None:
    """Conduct a job; `ready` is called once the job can be found and cancelled."""
    signals = Signals()
    adopt_orphans()
    _write_controller(paths, job_id)
    ready()
    host = LocalHost(paths, plan, job_id)
    Conductor(paths=paths, plan=plan, host=host, hear=signals.wait).run()


def _write_controller(paths: RunPaths, job_id: str) -> None:
    data = {
        "schema": SCHEMA,
        "job_id": job_id,
        "pid": os.getpid(),
        "identity": process.identity(os.getpid()),
        "boot_id": process.boot_id(),
        "host": socket.gethostname(),
        "started_at": time.time(),
    }
    write_whole(paths.controller, json.dumps(data, indent=2) + "\n")


def detach(work: Callable[[Callable[[], None]], None], output: Path) -> int:
    """Do `work` in a process that belongs to no shell or terminal; return once it says ready.

    Its output is appended to a file. Returns 1, its error on our stderr, when it failed before.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read()
        if said == READY:
            return 0
        sys.stderr.write(said.decode("utf-8", "replace") or "the controller ended at once\n")
        return 1
    os.close(reader)
    os.setsid()
    try:
        _redirect(output)
        work(lambda: _say(writer, READY))
    except Exception:  # noqa: BLE001 - the one who waits, or else the log, gets it in words
        traceback.print_exc()
        _say(writer, traceback.format_exc().encode())
        return 1
    return 0


def _say(writer: int, said: bytes) -> None:
    try:
        with open(writer, "wb") as pipe:
            pipe.write(said)
    except OSError:  # said before, or nobody waits any more
        pass


def _redirect(output: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, place in ((null, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(file)


def main() -> int:
    """Start the controller of the run directory and job id that the command line names."""
    root, job_id = sys.argv[1:]
    paths = RunPaths(root=Path(root))
    plan = Plan.from_json(paths.plan.read_text())
    return detach(functools.partial(conduct, paths, plan, job_id), paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
