"""Own the processes of this node's part of a job: adopt, watch, and leave none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0
_STATE, _EXIT_CODE = 0, 49  # fields of /proc/<pid>/stat counted from the one after the name


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end now if it is already gone."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def wait_status(pid: int) -> int | None:
    """Read the wait status of a process that ended and was not waited for yet; else None.

    The kernel shows it to the same user in the last field of /proc/<pid>/stat (proc(5)).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _EXIT_CODE or fields[_STATE] != "Z":
        return None
    return int(fields[_EXIT_CODE])


def is_running(pid: int) -> bool:
    """Say whether a process exists and has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return text.rpartition(")")[2].split()[_STATE] not in ("Z", "X")


def exit_and_signal(status: int) -> tuple[int, int]:
    """Turn a wait status into (exit status as a shell has it, signal or 0)."""
    code = os.waitstatus_to_exitcode(status)
    return (code, 0) if code >= 0 else (128 - code, -code)


def kill_descendants(deadline_s: float = KILL_S) -> list[int]:
    """Kill and reap everything below this process; return the pids that would not go."""
    deadline = time.monotonic() + deadline_s
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap()
        if time.monotonic() > deadline:
            return [process.pid for process in left]
        time.sleep(0.02)
    return []


def reap_adopted(besides: Collection[int]) -> None:
    """Reap what ended of the processes whose parents are gone; others wait for `besides`.

    Not while another thread waits for a process of its own, whose status this would take.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in besides:
                return
            os.waitpid(ended.si_pid, 0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
