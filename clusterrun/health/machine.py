"""Shared memory and the limits of a process."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from clusterrun.health.check import Check, note, ok, skip

SHM: Final = Path("/dev/shm")
INFINIBAND: Final = Path("/sys/class/infiniband")
SHM_BYTES: Final = 1 << 30  # containers start with 64 MiB
LEAST_FILES: Final = 4096
FILES_OF_RANK: Final = 512  # a rank with a few loader workers
LEAST_PROCESSES: Final = 1024
PROCESSES_OF_RANK: Final = 256  # threads count


def shm() -> Check:
    """Look at the size of /dev/shm, which loader workers and NCCL use."""
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        hint = "mount it, or set num_workers=0 in the data loader"
        return note("node.shm", f"{SHM} cannot be used: {error.strerror}", hint)
    size = found.f_blocks * found.f_frsize
    if size < SHM_BYTES:
        text = f"{SHM} has only {size >> 20} MiB for loader workers and NCCL"
        return note("node.shm", text, "start the container with --shm-size=16g")
    free = found.f_bavail * found.f_frsize
    return ok("node.shm", f"{SHM}: {gib(free)} of {gib(size)} are free")


def open_files(ranks: int) -> Check:
    """Compare the limit of open files with what the ranks of a node need."""
    needed = max(LEAST_FILES, ranks * FILES_OF_RANK)
    return _limit("node.files", resource.RLIMIT_NOFILE, needed, "open files", "n")


def processes(ranks: int) -> Check:
    """Compare the limit of processes and threads with what the ranks of a node need."""
    needed = max(LEAST_PROCESSES, ranks * PROCESSES_OF_RANK)
    return _limit("node.processes", resource.RLIMIT_NPROC, needed, "processes", "u")


def memlock() -> Check:
    """Look at the limit of locked memory, which InfiniBand needs."""
    if not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        return skip("node.memlock", "this machine has no InfiniBand device")
    unlimited = resource.RLIM_INFINITY
    return _limit("node.memlock", resource.RLIMIT_MEMLOCK, unlimited, "bytes of locked memory", "l")


def _limit(name: str, which: int, needed: int, what: str, letter: str) -> Check:
    soft, hard = resource.getrlimit(which)
    if _at_least(soft, needed):
        return ok(name, f"{number(soft)} {what} are allowed")
    text = f"only {soft} {what} are allowed; {number(needed)} are recommended"
    if _at_least(hard, needed):
        return note(name, text, f"run in the shell that submits: ulimit -{letter} {number(needed)}")
    return note(name, text, f"ask the administrator to raise the hard limit (ulimit -H -{letter})")


def _at_least(limit: int, needed: int) -> bool:
    unlimited = resource.RLIM_INFINITY
    return limit == unlimited or (needed != unlimited and limit >= needed)


def number(limit: int) -> str:
    """Write a limit of a process."""
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def gib(size: int) -> str:
    """Write bytes in GiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / (1 << 30):.1f} GiB"
