"""Locks of one machine that end with the process that holds them: files in /tmp, locked by flock.

Each user has a file of their own for a lock, which no other user can write or replace, so the owner
of the file is the holder. It says which process and run that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from clusterrun.rundir.record import user_name
from clusterrun.shared import files
from clusterrun.shared.locks import try_lock
from clusterrun.shared.typed import decoded

PLACE: Final = Path("/tmp")  # only root and the owner of a file can remove it there
WAIT_S: Final = 1.0  # for a process that is about to hold a lock, or to give it up
PAUSE_S: Final = 0.05
_FAR_S: Final = 3e8  # in the future: what cleans /tmp removes old files
_BYTES: Final = 4096
_LETTERS: Final = 200  # of a text in it


def gpu_lock(gpu: str) -> str:
    """Return the name of a GPU's lock; `gpu` is its UUID, or its index if that is unknown."""
    return f"clusterrun-gpu-{gpu}"


def job_lock(job_id: str) -> str:
    """Return the name of a job's lock, of which a machine holds one."""
    return f"clusterrun-job-{job_id}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock: its user is the kernel's word, the rest is its own.

    What it does not tell is 0 or "". `host` is the name that the run uses for this machine.
    """

    pid: int = 0
    user: str = ""
    run: str = ""
    host: str = ""

    def __str__(self) -> str:
        """Describe the holder for people."""
        process = f"process {self.pid}" if self.pid else "a process"
        owner = f" of {self.user}" if self.user else ""
        return f"run {self.run}{owner} ({process})" if self.run else f"{process}{owner}"


class Lock(NamedTuple):
    """A lock that this process holds until `free` or its end."""

    file: Path
    descriptor: int

    def free(self) -> None:
        """Release it."""
        with contextlib.suppress(OSError):
            self.file.unlink()
        os.close(self.descriptor)


def take(name: str, about: Mapping[str, str]) -> Lock | Holder:
    """Take a lock, or return its holder; `about` has run and host. Raises OSError."""
    texts = {key: text[:_LETTERS] for key, text in about.items()}
    own, until = _file(name, os.getuid()), time.monotonic() + WAIT_S
    while True:
        lock = _locked(own)
        # Of two users at the same moment, each looks after taking its own, and sees both.
        holder = holder_of(name, besides=own if lock else None)
        if lock and holder is None:
            os.pwrite(lock.descriptor, json.dumps({**texts, "pid": os.getpid()}).encode(), 0)
            return lock
        if lock:
            lock.free()
        if (holder and holder.pid) or time.monotonic() > until:
            return holder or Holder()
        time.sleep(random.uniform(0, PAUSE_S))


def holder_of(name: str, *, besides: Path | None = None) -> Holder | None:
    """Return the holder of a lock; None if it is free."""
    begin = _file(name, 0).stem
    found = (_holder(file) for file in PLACE.glob(f"{begin}.*") if file != besides)
    return next(filter(None, found), None)


def tidy() -> None:
    """Remove this user's files that killed processes have left."""
    for file in PLACE.glob(f"clusterrun-*.{os.getuid()}"):
        with contextlib.suppress(OSError):
            if lock := _locked(file):
                lock.free()


def _file(name: str, uid: int) -> Path:
    here = f"{name}-{os.uname().nodename}"  # containers may share /tmp
    return PLACE / f"{re.sub('[^A-Za-z0-9_-]', '-', here)}.{uid}"


def _holder(file: Path) -> Holder | None:
    """Return who holds a lock with a file; the owner holds it if it can't be opened."""
    try:
        user = user_name(file.lstat().st_uid)
    except FileNotFoundError:
        return None
    try:
        with files.open_regular(file) as opened:
            if try_lock(opened.fileno(), is_shared=True):
                return None
            held: Holder = decoded(Holder, json.loads(opened.read(_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        held = Holder()
    return dataclasses.replace(held, user=user)


def _locked(file: Path) -> Lock | None:
    """Lock this user's file, which is created if needed; None if that fails at the moment."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, files.PRIVATE)
    with contextlib.suppress(FileNotFoundError):
        if try_lock(descriptor) and os.fstat(descriptor).st_ino == file.stat().st_ino:
            os.ftruncate(descriptor, 0)
            os.fchmod(descriptor, 0o644)
            os.utime(descriptor, times=(time.time() + _FAR_S,) * 2)
            return Lock(file, descriptor)
    os.close(descriptor)
    return None
