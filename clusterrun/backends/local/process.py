"""Identify a process: its pid alone may have been reused."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def identity(pid: int) -> str | None:
    """Return a unique name of a process; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the program's name before it may contain anything
    if fields[0] in (b"Z", b"X"):
        return None
    return f"{boot_id()}:{fields[19].decode()}"  # start time in ticks since boot


def send_signal(pid: int, known_as: str, number: int) -> bool:
    """Signal a process if its identity is still `known_as`; return whether it was."""
    if identity(pid) != known_as:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
