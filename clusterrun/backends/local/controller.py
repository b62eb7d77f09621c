"""Run one job of the local backend to its end: `controller RUN_DIR JOB_ID`.

The controller is the conductor's process, detached from the submitting shell. It takes the place
of a cluster's slurmd and batch script, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterrun.backends.local import process
from clusterrun.backends.local.backend import SCHEMA
from clusterrun.backends.local.host import LocalHost
from clusterrun.launch.plan import Plan
from clusterrun.node.base.processes import adopt_orphans
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Signals
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan
from clusterrun.shared.files import read_json, write_whole

READY = b"ready"


def conduct(paths: RunPaths, plan: Plan, job_id: str, ready: Callable[[], None]) -> None:
    """Run a job's conductor; call `ready` once the job can be found and cancelled."""
    signals = Signals()
    adopt_orphans()
    write_controller(paths, job_id)
    ready()
    host = LocalHost(paths, plan, job_id)
    Conductor(paths=paths, plan=plan, host=host, hear=signals.wait).run()


def write_controller(paths: RunPaths, job_id: str) -> None:
    """Record this process as the controller of a job."""
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


def amend_controller(paths: RunPaths, **fields: Any) -> None:
    """Add to what is recorded of a controller, for readers on other machines.

    `is_gone`: it was killed; `waits`: what it waits for.
    """
    if data := read_json(paths.controller):
        write_whole(paths.controller, json.dumps({**data, **fields}, indent=2) + "\n")


def detach(work: Callable[[Callable[[], None]], None], output: Path) -> int:
    """Run `work` in a process without a terminal; return 0 once it is ready.

    Append its output to a file. If it fails before, print its error to stderr and return 1.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as pipe:
            message = pipe.read()
        if message == READY:
            return 0
        sys.stderr.write(
            message.decode("utf-8", "replace") or "the controller exited immediately\n"
        )
        return 1
    os.close(reader)
    os.setsid()
    try:
        _redirect(output)
        work(lambda: _send(writer, READY))
    except Exception:  # noqa: BLE001 - any error goes to the submitter and to the log
        traceback.print_exc()
        _send(writer, traceback.format_exc().encode())
        return 1
    return 0


def _send(writer: int, message: bytes) -> None:
    with contextlib.suppress(OSError), open(writer, "wb") as pipe:  # once; the reader may be gone
        pipe.write(message)


def _redirect(output: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, place in ((null, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, place)
    os.close(null)
    os.close(file)


def main() -> int:
    """Start the controller; the two arguments are run directory and job id."""
    root, job_id = sys.argv[1:]
    paths = RunPaths(root=Path(root))
    plan = read_plan(paths)
    return detach(functools.partial(conduct, paths, plan, job_id), paths.batch_output)


if __name__ == "__main__":
    sys.exit(main())
