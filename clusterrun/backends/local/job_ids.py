"""Ids of jobs without a queue: L1 on this machine, H2 on hosts, each number used once per user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from clusterrun.rundir.known_roots import remembered_roots, state_dir
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import link_target
from clusterrun.shared.files import write_whole
from clusterrun.shared.job_id import JobId
from clusterrun.shared.locks import locked

AHEAD: Final = 1_000_000  # of the last number here: others can't use up the numbers


def take_job_id(runs_dir: RunsDir, paths: RunPaths, *, prefix: str = "L", above: int = 0) -> JobId:
    """Take the next id by creating its link, which only one process can do.

    Its number is larger than `above`.

    The user's counter makes ids unique across projects. If it is lost, the known projects show
    which ids were used. If it can't be written, ids are unique only within the project.
    """
    runs_dir.by_job.mkdir(mode=0o700, exist_ok=True)
    counter = _counter()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            counter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(counter.with_suffix(".lock")))
        number = _believed(above, _last(counter, runs_dir)) + 1
        while True:
            job_id = JobId(f"{prefix}{number}")
            try:
                runs_dir.job_link(job_id).symlink_to(link_target(runs_dir, paths))
                break
            except FileExistsError:
                number += 1
        with contextlib.suppress(OSError):
            write_whole(counter, f"{job_id.number}\n")
    return job_id


def last_number(runs_dir: RunsDir) -> int:
    """Return the number of the newest id that this machine has used."""
    return _last(_counter(), runs_dir)


def remember_number(number: int) -> None:
    """Have ids that are taken here from now on be larger than `number`."""
    with contextlib.suppress(OSError, ValueError):
        counter = _counter()
        counter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(counter.with_suffix(".lock")):
            known = int(counter.read_text(encoding="ascii")) if counter.exists() else 0
            write_whole(counter, f"{_believed(number, known)}\n")


def _believed(number: int, last: int) -> int:
    """Return the later of another party's number and the last one here, unless it is absurd."""
    return number if last < number <= last + AHEAD else last


def _counter() -> Path:
    return state_dir() / "local-job-id"


def _last(counter: Path, runs_dir: RunsDir) -> int:
    try:
        known = JobId(f"L{counter.read_text(encoding='ascii').strip()}")
        return _newest_in(runs_dir, known.number)
    except (OSError, ValueError):
        return max(_newest_in(place, 0) for place in (runs_dir, *remembered_roots()))


def _newest_in(runs_dir: RunsDir, known: int) -> int:
    try:
        found = [JobId.read(entry.name) for entry in os.scandir(runs_dir.by_job)]
    except OSError:
        return known
    numbers = (job_id.number for job_id in found if job_id.is_own)
    return max((_believed(number, known) for number in numbers), default=known)
