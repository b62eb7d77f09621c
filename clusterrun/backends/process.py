"""Know a process again: a pid alone may belong to another program by now."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str:
    """Name this start of this machine; "" where the system has no name for it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def identity(pid: int) -> str | None:
    """Name a living process for good: None when it is gone, a zombie included."""
    if not sys.platform.startswith("linux"):
        return _portable_identity(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before it may hold anything
    if fields[0] in (b"Z", b"X"):
        return None
    return f"{boot_id()}:{fields[19].decode()}"  # start time in ticks since boot


def _portable_identity(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def send_signal(pid: int, known_as: str, number: int) -> bool:
    """Signal a process if it is still the one that was `known_as`; say whether it was."""
    try:
        descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return False
    try:
        if identity(pid) != known_as:
            return False
        if descriptor is None:
            os.kill(pid, number)
        else:  # the descriptor can't come to mean another process, as the pid can
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that none can hide (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def dying_with_parent() -> Callable[[], None]:
    """Return what a child runs before exec to be killed when this process ends (Linux)."""
    parent = os.getpid()

    def before_exec() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)

    return before_exec


_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # no prctl: not Linux
        _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
