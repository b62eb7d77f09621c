"""Read what the cgroups of this process count: OOM kills, memory, its limit and peak, CPU time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil

from clusterrun.diagnosis.kinds import Memory

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 has a number close to 2**63 instead
_NONE: Final = (None, Path("/"))


class MemoryUse(NamedTuple):
    """Bytes of memory: in use, the limit, and page cache, which the kernel can take back."""

    used: int
    limit: int
    cache: int


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """The cgroup of a step's task, and those above it up to the job's."""

    levels: tuple[Path, ...]
    is_v1: bool = False
    job: str = ""  # the path of the job's cgroup, as the kernel prints it; "" outside Slurm

    @classmethod
    def own(cls, text: str, root: Path = ROOT, controller: str = "memory") -> MemoryGroup:
        """Find the cgroup in the text of /proc/self/cgroup; Slurm's job is above `step_*`."""
        rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
        v1 = next((path for _, names, path in rows if controller in names.split(",")), None)
        v2 = next((path for number, names, path in rows if number == "0" and not names), None)
        path, base = (v2, root) if v1 is None else (v1, root / controller)
        parts = PurePosixPath(path or "").parts[1:]
        if path is None or ".." in parts:
            return cls(levels=())
        step = next((n for n, part in enumerate(parts) if part.startswith("step_")), len(parts))
        levels = [base.joinpath(*parts[:n]) for n in range(len(parts), step - 1, -1) if n]
        job = f"/{'/'.join(parts[:step])}" if 0 < step < len(parts) else ""
        return cls(levels=tuple(levels) or (base,), is_v1=v1 is not None, job=job)

    def kills(self) -> tuple[int | None, ...]:
        """Return each level's count of OOM kills; None if it cannot be read."""
        name = "memory.oom_control" if self.is_v1 else "memory.events"
        return tuple(_counts(level / name).get("oom_kill") for level in self.levels)

    def limit(self) -> tuple[int | None, Path]:
        """Return the lowest limit of these and the groups above, and the highest that has it."""
        name = "memory.limit_in_bytes" if self.is_v1 else "memory.max"
        places = {up for level in self.levels for up in (level, *level.parents)}
        return min(((size, up) for up in places if (size := _number(up / name))), default=_NONE)

    def memory(self) -> MemoryUse:
        """Return the memory in use where the limit is lowest: in a group, or on the machine."""
        machine, (limit, place) = psutil.virtual_memory(), self.limit()
        found = _counts(place / "memory.stat") if limit and limit < machine.total else {}
        names = ("total_rss", "total_cache", "total_shmem")
        own, cache, shared = names if self.is_v1 else ("anon", "file", "shmem")
        if limit is None or own not in found:
            shown = machine.cached - machine.shared
            return MemoryUse(machine.total - machine.available, machine.total, max(0, shown))
        in_memory = found.get(shared, 0)  # files in /dev/shm count as cache, but stay
        return MemoryUse(found[own] + in_memory, limit, max(0, found.get(cache, 0) - in_memory))

    def since(self, before: tuple[int | None, ...]) -> Memory | None:
        """Return the kills since `before`, limit and peak; None if no level can be read."""
        pairs = zip(before, self.kills(), strict=True)
        rises = [new - old for old, new in pairs if old is not None and new is not None]
        if not rises:
            return None
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        limit, peak = names if self.is_v1 else ("memory.max", "memory.peak")
        sizes = [(size, level) for level in self.levels if (size := _number(level / limit))]
        size, level = min(sizes, default=(None, self.levels[0]))
        return Memory(max(rises), size, _number(level / peak))


def own_group(controller: str = "memory", root: Path = ROOT, own: Path = OWN) -> MemoryGroup:
    """Return the cgroup of this process."""
    try:
        text = own.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return MemoryGroup(levels=())
    return MemoryGroup.own(text, root, controller)


def cpu_seconds(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the CPU time of the job's cgroup, or of this process's; None if it is not counted."""
    group = own_group("cpuacct", root, own)
    for level in group.levels[-1:]:  # a container may show the path that its cgroup has outside
        for place in (level, *level.parents):
            v1, v2 = _number(place / "cpuacct.usage"), _counts(place / "cpu.stat")
            if v1 is not None or "usage_usec" in v2:
                return v2["usage_usec"] / 1e6 if v1 is None else v1 / 1e9
    return None


def _counts(path: Path) -> dict[str, int]:
    """Read a file of names and numbers; {} if it can't be read."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) == 2}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int | None:
    try:
        found = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found if found < NO_LIMIT else None
