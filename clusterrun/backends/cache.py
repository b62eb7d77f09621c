"""Cache a scheduler's answers for a few seconds, for all processes of a user.

Ten terminals that watch the same jobs send slurmctld one query in ten seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from clusterrun.backends.base import SchedulerJob
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.known_roots import state_dir
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.locks import locked
from clusterrun.shared.typed import decoded

TTL_S = 10.0
FORGET_S = 3600.0  # since the answer was last requested

Answer = dict[str, SchedulerJob]
T = TypeVar("T")


def through(key: Sequence[str], max_age_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return an answer that is at most `max_age_s` old; call `ask` if there is none.

    The process that asks holds a lock, and the others wait for its answer. Nothing is cached if
    the directory can't be written.
    """
    return _through(key, max_age_s, ask, read=_read, write=_write)


def text_through(key: Sequence[str], max_age_s: float, ask: Callable[[], str]) -> str:
    """Return a program's output, as `through`."""
    return _through(key, max_age_s, ask, read=_read_text, write=_write_text)


def _through(
    key: Sequence[str],
    max_age_s: float,
    ask: Callable[[], T],
    *,
    read: Callable[[Path, float], T | None],
    write: Callable[[Path, T], None],
) -> T:
    with contextlib.ExitStack() as stack:
        try:
            file = _directory() / f"{_digest(key)}.json"
            stack.enter_context(locked(file.with_suffix(".lock")))
        except (OSError, ClusterrunError):
            return ask()
        answer = read(file, max_age_s)
        if answer is None:
            answer = ask()
            with contextlib.suppress(OSError):
                write(file, answer)
                _forget_old(file.parent)
        return answer


def forget() -> None:
    """Delete all answers: jobs have just changed."""
    with contextlib.suppress(OSError):
        for file in _directory().glob("*.json"):
            file.unlink(missing_ok=True)


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "clusterrun" if runtime else state_dir() / "cache"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _digest(key: Sequence[str]) -> str:
    whole = json.dumps([os.environ.get("SLURM_CONF", ""), *key])
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def _read(file: Path, max_age_s: float) -> Answer | None:
    data = read_json(file) or {}
    try:
        age_s = time.time() - decoded(float, data.get("asked_at"))
        jobs: Answer = decoded(dict[str, SchedulerJob], data.get("jobs"))
    except ValueError:
        return None
    return jobs if 0 <= age_s < max_age_s else None


def _write(file: Path, answer: Answer) -> None:
    jobs = {job_id: dataclasses.asdict(job) for job_id, job in answer.items()}
    write_whole(file, json.dumps({"asked_at": time.time(), "jobs": jobs}))


def _read_text(file: Path, max_age_s: float) -> str | None:
    try:
        data = read_json(file) or {}
        age_s, text = time.time() - data["asked_at"], data["text"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return text if isinstance(text, str) and 0 <= age_s < max_age_s else None


def _write_text(file: Path, text: str) -> None:
    write_whole(file, json.dumps({"asked_at": time.time(), "text": text}))


def _forget_old(directory: Path) -> None:
    oldest = time.time() - FORGET_S
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < oldest:
                os.unlink(entry.path)
