"""Locks between processes and nodes, with files that are never replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from clusterrun.errors import ClusterrunError

WAIT_S = 60.0
PAUSE_S = 0.05


@contextlib.contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[None]:
    """Hold the lock of a file; create the file if needed, and keep it.

    Without locks in the file system this locks nothing. Raises ClusterrunError if another process
    holds the lock for longer than `wait_s` (default: WAIT_S): a stopped process must not block all
    others. Raises OSError if the file can't be opened.
    """
    # NFS locks only files that are open for writing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, path, time.monotonic() + (WAIT_S if wait_s is None else wait_s))
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _held(descriptor, path) from error
            time.sleep(PAUSE_S)
        except OSError:
            return
        else:
            _sign(descriptor)
            return


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _held(descriptor: int, path: Path) -> ClusterrunError:
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    return ClusterrunError(
        f"{holder} holds the lock {path}", hint="wait until it ends, or kill it if it is stopped"
    )
