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
from typing import Any, TypeVar

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


def through(key: Sequence[str], max_age_s: float, ask: Callable[[], T], kind: Any = Answer) -> T:
    """Return an answer that is at most `max_age_s` old; call `ask` if there is none.

    The process that asks holds a lock, and the others wait for its answer. Nothing is cached if
    the directory can't be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            whole = json.dumps([os.environ.get("SLURM_CONF", ""), *key])
            file = _directory() / f"{hashlib.sha256(whole.encode()).hexdigest()[:24]}.json"
            stack.enter_context(locked(file.with_suffix(".lock")))
        except (OSError, ClusterrunError):
            return ask()
        data = read_json(file) or {}
        with contextlib.suppress(ValueError):
            if 0 <= time.time() - decoded(float, data.get("asked_at")) < max_age_s:
                found: T = decoded(kind, data.get("answer"))
                return found
        answer = ask()
        with contextlib.suppress(OSError):
            now = {"asked_at": time.time(), "answer": answer}
            write_whole(file, json.dumps(now, default=dataclasses.asdict))
            oldest = time.time() - FORGET_S
            for entry in os.scandir(file.parent):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)
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
