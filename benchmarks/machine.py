"""Describe the machine of a measurement, without host names and paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def machine(directory: Path) -> dict[str, str]:
    """Describe processor, memory, interpreter, and the file system of a directory."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "file system": _file_system(directory),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    real = str(directory.resolve())
    mounts = [part for part in psutil.disk_partitions(all=True) if _is_below(real, part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")
