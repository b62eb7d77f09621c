"""A machine's memory, limits and interfaces, and what its cgroup counts."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

from clusterrun.diagnosis.kinds import Memory
from clusterrun.shared.files import SPARE
from clusterrun.shared.finding import Finding, bad, fail, note, ok, skip
from clusterrun.shared.installed import installed_version

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 has a number close to 2**63 instead
SHM: Final = Path("/dev/shm")
INFINIBAND: Final = Path("/sys/class/infiniband")
UNLIMITED: Final = "unlimited"
SHM_BYTES: Final = 1 << 30
LEAST_SHM_BYTES: Final = 64 << 20  # the default of Docker
LEAST_FILES: Final = 4096
FILES_OF_RANK: Final = 512  # a rank with a few loader workers
FEWEST_FILES: Final = 16  # an agent without ranks
BYTES_OF_RANK: Final = 1 << 30
LEAST_BYTES_OF_RANK: Final = 144 << 20  # a process that has imported torch, and nothing else
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
EVERY_NODE: Final = ("torch", "accelerate")  # an attempt does not start if they differ
PACKAGES: Final = (*EVERY_NODE, "deepspeed", "transformers", "clusterrun")
NCCL: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
CPU: Final = Path("/proc/cpuinfo")
_START: Final = 4096  # bytes: the first CPU; the kernel needs milliseconds for hundreds
# Interfaces of containers and virtual machines: their names are random.
_INNER: Final = re.compile(r"lo$|veth|docker|br-|virbr|cali|cni|flannel|tun|tap|dummy|ifb|sit|ip6")


def shm(ranks: int) -> Finding:
    """Look at the size and the free bytes of /dev/shm, which loader workers and NCCL use."""
    name, is_sure = "node.shm", ranks > 1  # NCCL then needs it; loader workers may not exist
    try:
        disk = os.statvfs(SHM)
    except OSError as error:
        hint = "mount it, or set num_workers=0 in the data loader"
        return bad(name, f"{SHM} cannot be used: {error.strerror}", hint, is_sure=is_sure)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if size < SHM_BYTES:
        text = f"{SHM} has only {size >> 20} MiB for DataLoader workers and NCCL"
        hint = "start the container with --shm-size=16g"
        return bad(name, text, hint, is_sure=is_sure and size < LEAST_SHM_BYTES)
    text = f"{gib(free)} of {gib(size)} are free"
    if free < LEAST_SHM_BYTES:  # crashed jobs leave their files there
        hint = f"list the files that your finished jobs left, and delete them: ls -l {SHM}"
        return bad(name, f"{SHM}: only {text}", hint, is_sure=is_sure)
    return ok(name, f"{SHM}: {text}")


def memory(ranks: int, planned: int) -> Finding:
    """Compare the memory for this process with what ranks need; `planned`: estimate, 0 if none."""
    name, machine = "node.memory", psutil.virtual_memory()
    limit, _ = own_group().limit()
    free = machine.available + psutil.swap_memory().free
    usable = min(free, limit or free)
    least = (ranks + 1) * LEAST_BYTES_OF_RANK  # the agent is one more
    text = f"{gib(usable)} of {gib(machine.total)} can be used"
    hint = "find the largest processes, and end those you can: ps aux --sort -rss"
    if limit:
        text = f"{text}; the limit of this job is {gib(limit)}"
    if usable == limit:  # not other programs, but the job's limit is the bound
        hint = "request more with --mem"
    if usable < least:
        return fail(name, f"{text}; {ranks} ranks need at least {gib(least)}", hint)
    if usable < planned:
        return note(name, f"{text}; clusterrun plan estimates {gib(planned)}", hint)
    if usable < ranks * BYTES_OF_RANK:
        return note(name, f"{text}, less than 1 GiB for each rank", hint)
    return ok(name, text)


def open_files(ranks: int, connections: int) -> Finding:
    """Compare the hard limit of open files with what ranks and the head's connections need."""
    # The agent raises the soft limit.
    name, (_, hard) = "node.files", resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(FEWEST_FILES + ranks, connections)
    recommended = max(LEAST_FILES, ranks * FILES_OF_RANK, connections + SPARE)
    text = f"{number(hard)} open files are allowed"
    if hard == resource.RLIM_INFINITY or hard >= recommended:
        return ok(name, text)
    is_sure = hard < needed
    wanted = f"{needed} are needed" if is_sure else f"{recommended} are recommended"
    hint = "ask the administrator to raise the hard limit (ulimit -H -n)"
    return bad(name, f"only {text}; {wanted}", hint, is_sure=is_sure)


def memlock() -> Finding:
    """Look at the limit of locked memory, which InfiniBand needs."""
    name = "node.memlock"
    if not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        return skip(name, "this machine has no InfiniBand device")
    soft, hard = map(number, resource.getrlimit(resource.RLIMIT_MEMLOCK))
    text = f"{soft} bytes of locked memory are allowed"
    if soft == UNLIMITED:
        return ok(name, text)
    hint = "ask the administrator to raise the hard limit (ulimit -H -l)"
    if hard == UNLIMITED:
        hint = f"run in the shell that submits: ulimit -l {UNLIMITED}"
    return note(name, f"only {text}; {UNLIMITED} is recommended", hint)


def number(limit: int) -> str:
    """Write a limit of a process."""
    return UNLIMITED if limit == resource.RLIM_INFINITY else str(limit)


def gib(size: int) -> str:
    """Write bytes in GiB, small ones in MiB or KiB.

    >>> gib(3 << 29), gib(10 << 20), gib(3 << 10)
    ('1.5 GiB', '10 MiB', '3 KiB')
    """
    if 0 < size < 1 << 20:
        return f"{size >> 10} KiB"
    return f"{size >> 20} MiB" if size < 1 << 29 else f"{size / (1 << 30):.1f} GiB"


def text_of(path: Path) -> str:
    """Return the text of a small file, such as one of the kernel; "" if it can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


# What should be equal on all nodes of a job


def facts(gpus: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what nodes are compared by, as `group.fact`; leave out what is unknown."""
    found = {
        "versions.python": sys.version.split()[0],
        **{f"versions.{name}": value for name, value in packages().items()},
        "versions.NCCL": next(filter(None, map(installed_version, NCCL)), ""),  # one for each CUDA
        "system.kernel": os.uname().release,
        **{f"hardware.{name}": value for name, value in _hardware()},
        **{f"network.{name}": value for name, value in _network()},
        **{f"gpu.{name}": value for name, value in (gpus or {}).items()},
    }
    return {name: value for name, value in found.items() if value}


def versions() -> dict[str, str]:
    """Return the versions without which no attempt starts; leave out a missing library."""
    return {"python": "{}.{}".format(*sys.version_info), **packages(EVERY_NODE)}


def packages(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages that are installed, by default all that are compared."""
    found = {name: installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def _hardware() -> Iterator[tuple[str, str]]:
    """Yield the CPU, the usable CPUs and the memory; POWER calls its model `cpu`."""
    with contextlib.suppress(OSError), CPU.open(errors="replace") as file:
        name = re.search(r"^(?:model name|cpu)\s*:\s*(.*)$", file.read(_START), re.MULTILINE)
        yield "CPU", name[1] if name else os.uname().machine  # ARM has no such line
    yield "usable CPUs", str(len(os.sched_getaffinity(0)))
    yield "memory", gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _network() -> Iterator[tuple[str, str]]:
    """Yield the state of each interface to other machines, and of each port of InfiniBand."""
    for name, found in sorted(psutil.net_if_stats().items()):
        if not _INNER.match(name):
            speed = f"{found.speed} Mb/s, " if found.speed else ""
            yield name, f"{'up' if found.isup else 'down'}, {speed}MTU {found.mtu}"
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state = text_of(port / "state").rpartition(":")[2].strip()
        yield f"{port.parts[-3]}/{port.name}", f"{state}, {text_of(port / 'rate')}"


# What the cgroups of this process count: OOM kills, memory and its limit, CPU time


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """The cgroup of a step's task, and those above it up to the job's."""

    levels: tuple[Path, ...]
    is_v1: bool = False

    @classmethod
    def own(cls, text: str, root: Path = ROOT, controller: str = "memory") -> MemoryGroup:
        """Find the cgroup by the text of /proc/self/cgroup: lines of `number:controllers:path`.

        The job's cgroup is the one above Slurm's `step_*`; without a step, there is one level.
        """
        rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
        v1_path = next((path for _, names, path in rows if controller in names.split(",")), None)
        v2_path = next((path for number, names, path in rows if number == "0" and not names), None)
        path, mount = (v2_path, root) if v1_path is None else (v1_path, root / controller)
        parts = PurePosixPath(path or "").parts[1:]
        if path is None or ".." in parts:  # no cgroup, or one that a container does not show
            return cls(levels=())
        is_step = [part.startswith("step_") for part in parts]
        job_depth = is_step.index(True) if True in is_step else len(parts)
        # From the task's cgroup up to the job's, which is at least one below the root.
        depths = range(len(parts), max(job_depth, 1) - 1, -1)
        levels = tuple(mount.joinpath(*parts[:depth]) for depth in depths)
        return cls(levels=levels or (mount,), is_v1=v1_path is not None)

    def kills(self) -> tuple[int | None, ...]:
        """Return each level's count of OOM kills; None if it cannot be read."""
        name = "memory.oom_control" if self.is_v1 else "memory.events"
        return tuple(_counts(level / name).get("oom_kill") for level in self.levels)

    def limit(self) -> tuple[int | None, Path]:
        """Return the lowest limit of the groups and their parents, and the topmost one with it."""
        name = "memory.limit_in_bytes" if self.is_v1 else "memory.max"
        places = {place for level in self.levels for place in (level, *level.parents)}
        limits = ((_number(place / name), place) for place in places)
        # Of groups with the same limit, the path of the topmost sorts first.
        return min(((size, place) for size, place in limits if size), default=(None, Path("/")))

    def memory(self) -> tuple[int, int]:
        """Return the used bytes and the limit of the group with the lowest limit, or the machine's.

        Page cache does not count, but files in /dev/shm do: they stay in memory.
        """
        machine, (limit, place) = psutil.virtual_memory(), self.limit()
        counts = _counts(place / "memory.stat") if limit and limit < machine.total else {}
        own, shared = ("total_rss", "total_shmem") if self.is_v1 else ("anon", "shmem")
        if limit is None or own not in counts:
            return machine.total - machine.available, machine.total
        return counts[own] + counts.get(shared, 0), limit

    def since(self, before: tuple[int | None, ...]) -> Memory | None:
        """Return the kills since `before`, and the limit; None if no level can be read."""
        pairs = zip(before, self.kills(), strict=True)
        rises = [new - old for old, new in pairs if old is not None and new is not None]
        if not rises:
            return None
        return Memory(max(rises), self.limit()[0])  # no sum: levels may count the same kills


def own_group(controller: str = "memory", root: Path = ROOT, own: Path = OWN) -> MemoryGroup:
    """Return the cgroup of this process."""
    return MemoryGroup.own(text_of(own), root, controller)


def cpu_seconds(root: Path = ROOT, own: Path = OWN) -> float:
    """Return the CPU time of the job's cgroup, or of this process's; the machine's without one."""
    for job in own_group("cpuacct", root, own).levels[-1:]:  # the highest, if any
        for place in (job, *job.parents):  # a container may show the path that it has outside
            nanoseconds, counts = _number(place / "cpuacct.usage"), _counts(place / "cpu.stat")
            if nanoseconds is not None:  # cgroup v1
                return nanoseconds / 1e9
            if "usage_usec" in counts:  # cgroup v2
                return counts["usage_usec"] / 1e6
    cpu = psutil.cpu_times()
    return float(cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq)


def own_memory(pids: Iterable[int]) -> int:
    """Return the bytes that processes hold and share with no file and no other program."""
    found = (text_of(Path(f"/proc/{pid}/statm")).split() for pid in pids)
    return sum((int(row[1]) - int(row[2])) * _PAGE_BYTES for row in found if len(row) > 2)


def _counts(path: Path) -> dict[str, int]:
    """Read a file of names and numbers; {} if it can't be read."""
    rows = [line.split() for line in text_of(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() and int(text) < NO_LIMIT else None
