"""Locks of one machine that end with the process that holds them: files in /tmp, locked by flock.

Each user has a file of their own for a lock, which no other user can write or replace, so the owner
of the file is the holder. It says which process and run that is. Somebody else can lock it too, but
this counts for nothing without that process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterrun.backends.local.process import identity
from clusterrun.rundir.record import user_name
from clusterrun.shared.locks import try_lock
from clusterrun.shared.typed import decoded

PLACE: Final = Path("/tmp")  # only root and the owner of a file can remove it there
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
    """The process that holds a lock: its user is the kernel's word, the rest is its own.

    What it does not tell is 0 or "". `host` is the name that the run uses for this machine;
    `identity` and `namespace` tell the process from others with its number.
    """

    pid: int = 0
    user: str = ""
    run: str = ""
    job: str = ""
    host: str = ""
    identity: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        """Describe the holder for people."""
        process = f"process {self.pid}" if self.pid else "a process"
        owner = f" of {self.user}" if self.user else ""
        return f"run {self.run}{owner} ({process})" if self.run else f"{process}{owner}"

    @property
    def is_over(self) -> bool:
        """Return whether the process has certainly ended."""
        try:
            os.getpgid(self.pid)
        except (ProcessLookupError, OverflowError):
            return self.namespace == _namespace()
        now = identity(self.pid)  # None if /proc does not show it
        return now not in (None, self.identity) and self.namespace == _namespace()


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
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def take(name: str, about: Mapping[str, Any]) -> Lock:
    """Take a lock; `about` has run, job and host. Raises Busy and OSError."""
    texts = {key: str(about[key])[:_LETTERS] for key in ("run", "job", "host") if key in about}
    me = {"pid": os.getpid(), "identity": identity(os.getpid()), "namespace": _namespace()}
    own, until = _file(name, os.getuid()), time.monotonic() + WAIT_S
    while True:
        holder = holder_of(name)
        if holder is None and (lock := _locked(own)):
            # Of two users at the same moment, each looks after taking its own, and sees both.
            holder = holder_of(name, besides=own)
            if holder is None:
                os.pwrite(lock._descriptor, json.dumps({**texts, **me}).encode(), 0)
                return lock
            lock.free()
        is_late = time.monotonic() > until
        if holder and (holder.pid or is_late):
            raise Busy(name, holder)
        if is_late:  # somebody else has locked this user's file
            own.unlink(missing_ok=True)
        time.sleep(random.uniform(0, PAUSE_S))


def holder_of(name: str, *, besides: Path | None = None) -> Holder | None:
    """Return the holder of a lock; None if it is free."""
    files = (PLACE / entry.name for entry in os.scandir(PLACE))
    begin = _file(name, 0).stem
    found = (_holder(file) for file in files if file.stem == begin and file != besides)
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
    """Return who holds a lock with a file; the owner holds it if it is not as we write them."""
    try:
        owner = file.lstat().st_uid
        descriptor = os.open(file, os.O_RDONLY | _OPEN)
    except FileNotFoundError:
        return None
    except OSError:
        return Holder(user=user_name(owner))
    try:
        is_ours = stat.S_ISREG(os.fstat(descriptor).st_mode) and file.suffix == f".{owner}"
        if is_ours and try_lock(descriptor, is_shared=True):
            return None
        held: Holder = decoded(Holder, json.loads(os.read(descriptor, _BYTES).decode()))
    except (OSError, ValueError, RecursionError):
        held = Holder()
    finally:
        os.close(descriptor)
    return None if held.pid and held.is_over else dataclasses.replace(held, user=user_name(owner))


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _locked(file: Path) -> Lock | None:
    """Lock this user's file, and create it first if needed; None if that fails at the moment."""
    create = 0 if os.path.lexists(file) else os.O_CREAT | os.O_EXCL
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # it comes or goes just now
        descriptor = os.open(file, os.O_RDWR | create | _OPEN, 0o600)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            is_ours = try_lock(descriptor)
            if is_ours and os.fstat(descriptor).st_ino == file.stat().st_ino:
                os.ftruncate(descriptor, 0)
                os.fchmod(descriptor, 0o644)
                os.utime(descriptor, times=(time.time() + _FAR_S,) * 2)
                stack.pop_all()
                return Lock(file, descriptor)
    return None
