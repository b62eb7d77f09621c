"""Locks between processes: flock on a file. All locks of clusterrun are made here.

The kernel frees a lock when its process ends, however it ends. It holds between the processes of a
machine; between nodes as well if their file system passes locks on, as NFS does unless it is
mounted with `nolock` or `local_lock`. What must be decided once, whatever the file system, and for
longer than a process lives, is a file that one process creates: `files.create`.
"""

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

    If the file system has no locks, nothing is locked. Raises ClusterrunError if another process
    holds the lock for longer than `wait_s` (default: WAIT_S): a stopped process must not block all
    others. Raises OSError if the file can't be opened.
    """
    # NFS locks only files that are open for writing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks, or the disk is full
            while True:
                with contextlib.suppress(BlockingIOError):  # another process holds the lock
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace")
                    text = f"{holder or 'another process'} holds the lock {path}"
                    hint = "wait until it ends, or kill it if it hangs or is suspended"
                    raise ClusterrunError(text, hint=hint)
                time.sleep(PAUSE_S)
            # Name the holder, for the error of others. On a full disk it is locked without a name.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)
