"""Locks of one machine that end with the process that holds them: files in /tmp, locked by flock.

All users share the file of a lock; it says which process and run holds it. Locks are agreements: a
user who wants to can hold one without a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterrun.rundir.record import current_user
from clusterrun.shared.locks import try_lock
from clusterrun.shared.typed import decoded

PLACE: Final = Path("/tmp")
WAIT_S: Final = 1.0  # for a process that is about to hold a lock, or to give it up
PAUSE_S: Final = 0.05
_FAR_S: Final = 3e8  # in the future: what cleans /tmp removes old files
_BYTES: Final = 4096
_LETTERS: Final = 200  # of a text in it
_OPEN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def gpu_lock(gpu: str) -> str:
    """Return the name of a GPU's lock; `gpu` is its UUID, or its index if that is unknown."""
    return f"clusterrun-gpu-{gpu}"


def job_lock(job_id: str) -> str:
    """Return the name of a job's lock, of which a machine holds one."""
    return f"clusterrun-job-{job_id}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock, by its own words; what it does not tell is 0 or "".

    `host` is the name that the run uses for this machine.
    """

    pid: int = 0
    user: str = ""
    run: str = ""
    job: str = ""
    host: str = ""

    def __str__(self) -> str:
        """Describe the holder for people."""
        process = f"process {self.pid}" if self.pid else "a process"
        return f"run {self.run} of {self.user} ({process})" if self.run else process


class Busy(Exception):
    """Another process holds the lock `name`."""

    def __init__(self, name: str, holder: Holder) -> None:
        super().__init__(f"{name} is held by {holder}")
        self.name, self.holder = name, holder


class Lock:
    """A lock that this process holds until `free` or its end."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self._file, self._descriptor = file, descriptor

    def free(self) -> None:
        """Release it; a second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # of the user who created it
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def take(name: str, about: Mapping[str, Any]) -> Lock:
    """Take a lock; `about` has run, job and host. Raises Busy and OSError."""
    texts = {key: str(about[key])[:_LETTERS] for key in ("run", "job", "host") if key in about}
    me = json.dumps({**texts, "pid": os.getpid(), "user": current_user()}).encode()
    until = time.monotonic() + WAIT_S
    while (descriptor := _locked(_file(name))) is None:
        holder, is_late = holder_of(name), time.monotonic() > until
        if is_late or (holder and holder.pid):
            raise Busy(name, holder or Holder())
        time.sleep(PAUSE_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, me, 0)
    return Lock(_file(name), descriptor)


def holder_of(name: str) -> Holder | None:
    """Return the holder of a lock; None if it is free."""
    try:
        descriptor = os.open(_file(name), os.O_RDONLY | _OPEN)
    except OSError:
        return None
    try:
        if try_lock(descriptor, is_shared=True):
            return None
        found: Holder = decoded(Holder, json.loads(os.read(descriptor, _BYTES).decode()))
    except (OSError, ValueError, RecursionError):
        return Holder()
    finally:
        os.close(descriptor)
    return found


def _file(name: str) -> Path:
    here = f"{name}-{os.uname().nodename}"  # containers may share /tmp
    return PLACE / re.sub("[^A-Za-z0-9_-]", "-", here)


def _locked(file: Path) -> int | None:
    """Open and lock a file, and create it first if needed; None if that fails at the moment."""
    with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
        if os.path.lexists(file):
            descriptor = os.open(file, os.O_RDWR | _OPEN)
        else:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
            os.fchmod(descriptor, 0o666)  # whatever the umask
            os.utime(descriptor, times=(time.time() + _FAR_S,) * 2)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if try_lock(descriptor) and os.fstat(descriptor).st_ino == file.stat().st_ino:
                stack.pop_all()
                return descriptor
    return None
