"""Remember a scheduler's answers for some seconds, for all processes of a user.

Ten terminals that ask about the same jobs cost slurmctld one question in ten seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clusterrun.backends.base import SchedulerJob
from clusterrun.rundir.known_roots import state_dir
from clusterrun.shared.files import write_whole
from clusterrun.shared.state import JobState

TTL_S = 10.0
FORGET_S = 3600.0  # questions that nobody asks any more
SETTLED_S = 120.0  # what ended longer ago changes no more, neither by lagging accounting
FORGET_ENDED_S = 90 * 86400.0

Answer = dict[str, SchedulerJob]


def through(key: Sequence[str], max_age_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return an answer that is at most `max_age_s` old, asking if there is none.

    Who asks holds a lock, so that the others wait for that one answer. A directory that can't
    be written costs the memory, not the answer.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = _directory() / f"{_digest(key)}.json"
            stack.enter_context(_locked(file))
        except OSError:
            return ask()
        answer = _read(file, max_age_s)
        if answer is None:
            answer = ask()
            with contextlib.suppress(OSError):
                _write(file, answer)
                _forget_old(file.parent, FORGET_S)
        return answer


def remember_ended(cluster: str, answer: Answer) -> None:
    """Keep what is known of jobs that ended a while ago: it will not change any more."""
    latest = time.time() - SETTLED_S
    settled = {
        job_id: job
        for job_id, job in answer.items()
        if job.state.is_terminal and job.exit_code is not None and (job.end or latest) < latest
    }
    with contextlib.suppress(OSError):
        for job_id, job in settled.items():
            _write(_ended_file(cluster, job_id), {job_id: job})
        if settled:
            _forget_old(_ended_dir(), FORGET_ENDED_S)


def recall_ended(cluster: str, job_ids: Sequence[str], since: float = 0.0) -> Answer:
    """Return what was kept of jobs that ended, other than before `since`.

    A Slurm that was set up anew, or has run out of numbers, gives them out again.
    """
    found: Answer = {}
    with contextlib.suppress(OSError):
        for job_id in job_ids:
            found |= _read(_ended_file(cluster, job_id), FORGET_ENDED_S) or {}
    return {job_id: job for job_id, job in found.items() if (job.end or since) >= since}


def _ended_file(cluster: str, job_id: str) -> Path:
    return _ended_dir() / f"{_digest((cluster, job_id))}.json"


def _ended_dir() -> Path:
    directory = state_dir() / "ended"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "clusterrun" if runtime else state_dir() / "cache"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _digest(key: Sequence[str]) -> str:
    whole = json.dumps([os.environ.get("SLURM_CONF", ""), *key])
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(file: Path, max_age_s: float) -> Answer | None:
    try:
        data = json.loads(file.read_text())
        age_s = time.time() - data["asked_at"]
        jobs = {job_id: _job(row) for job_id, row in data["jobs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return jobs if 0 <= age_s < max_age_s else None


def _job(row: dict[str, Any]) -> SchedulerJob:
    return SchedulerJob(**{**row, "state": JobState(row["state"])})


def _write(file: Path, answer: Answer) -> None:
    jobs = {job_id: dataclasses.asdict(job) for job_id, job in answer.items()}
    write_whole(file, json.dumps({"asked_at": time.time(), "jobs": jobs}))


def _forget_old(directory: Path, age_s: float) -> None:
    oldest = time.time() - age_s
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < oldest:
                os.unlink(entry.path)
