"""What runs on this machine for a job."""

from __future__ import annotations

import os

import psutil

from tests.patience import wait_for
from tests.road import Project


def processes_of(here: Project, job_id: str) -> list[psutil.Process]:
    """Find what runs for a job, by the run directory in its environment or command line."""
    mark = str(here.run_dir(job_id))
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ().get("CLUSTERRUN_RUN_DIR", "")
            if process.pid != os.getpid() and (env == mark or mark in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_none(here: Project, job_id: str, timeout_s: float = 10) -> None:

    def left() -> list[psutil.Process]:
        return [p for p in processes_of(here, job_id) if not _is_zombie(p)]

    wait_for(lambda: not left(), f"the end of all processes of {job_id}", timeout_s)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
