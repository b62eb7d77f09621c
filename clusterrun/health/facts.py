"""What should be equal on all nodes of a job: packages, system, hardware, limits, network."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil

from clusterrun.health import machine
from clusterrun.shared.installed import installed_version

EVERY_NODE: Final = ("torch", "accelerate")  # an attempt does not start if they differ
PACKAGES: Final = (*EVERY_NODE, "deepspeed", "transformers", "clusterrun")
NCCL: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
CPU: Final = Path("/proc/cpuinfo")
_START: Final = 4096  # bytes: the first CPU; the kernel needs milliseconds for hundreds
_LIMITS: Final = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
# Interfaces of containers and virtual machines: their names are random.
_INNER: Final = re.compile(r"lo$|veth|docker|br-|virbr|cali|cni|flannel|tun|tap|dummy|ifb|sit|ip6")


def facts(gpus: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what nodes are compared by, as `group.fact`; leave out what is unknown.

    `gpus` are facts of the GPUs, by name.
    """
    found = {
        "versions.python": platform.python_version(),
        **{f"versions.{name}": value for name, value in packages().items()},
        "versions.NCCL": next(filter(None, map(installed_version, NCCL)), ""),
        **{f"system.{name}": value for name, value in _system()},
        **{f"hardware.{name}": value for name, value in _hardware()},
        **{f"limits.{x}": machine.number(resource.getrlimit(y)[0]) for x, y in _LIMITS.items()},
        **{f"network.{name}": value for name, value in _network()},
        **{f"gpu.{name}": value for name, value in (gpus or {}).items()},
    }
    return {name: value for name, value in found.items() if value}


def versions() -> dict[str, str]:
    """Return the versions without which no attempt starts; leave out a missing library."""
    found = {library: installed_version(library) for library in EVERY_NODE}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, **{name: version for name, version in found.items() if version}}


def packages() -> dict[str, str]:
    """Return the version of each package that nodes are compared by, and that is installed."""
    found = {name: installed_version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def _system() -> Iterator[tuple[str, str]]:
    yield "kernel", os.uname().release
    with contextlib.suppress(OSError):
        yield "OS", platform.freedesktop_os_release().get("PRETTY_NAME", "")
    with contextlib.suppress(OSError, ValueError):
        yield "libc", os.confstr("CS_GNU_LIBC_VERSION") or ""


def _hardware() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), CPU.open(errors="replace") as file:
        name = re.search(r"^(?:model name|cpu)\s*:\s*(.*)$", file.read(_START), re.MULTILINE)
        yield "CPU", name[1] if name else platform.machine()
    yield "usable CPUs", str(len(os.sched_getaffinity(0)))
    yield "memory", machine.gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError):
        found = os.statvfs(machine.SHM)
        yield str(machine.SHM), machine.gib(found.f_blocks * found.f_frsize)


def _network() -> Iterator[tuple[str, str]]:
    for name, found in sorted(psutil.net_if_stats().items()):
        if not _INNER.match(name):
            speed = f"{found.speed} Mb/s, " if found.speed else ""
            yield name, f"{'up' if found.isup else 'down'}, {speed}MTU {found.mtu}"
    for name, state in machine.infiniband().items():
        device, _, port = name.partition("/")
        place = machine.INFINIBAND / device
        yield f"{device} firmware", machine.text_of(place / "fw_ver")
        yield name, f"{state}, {machine.text_of(place / 'ports' / port / 'rate')}"
