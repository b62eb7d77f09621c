"""Read what the memory cgroup of this process counts: OOM kills, its limit and its peak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clusterrun.logformat.notes import Memory

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 has a number close to 2**63 instead


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """The cgroup of a step's task, and those above it up to the job's."""

    levels: tuple[Path, ...]
    is_v1: bool = False
    job: str = ""  # the path of the job's cgroup, as the kernel prints it; "" outside Slurm

    @classmethod
    def own(cls, text: str, root: Path = ROOT) -> MemoryGroup:
        """Find the cgroup in the text of /proc/self/cgroup; Slurm's job is above `step_*`."""
        rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
        v1 = next((path for _, names, path in rows if "memory" in names.split(",")), None)
        v2 = next((path for number, names, path in rows if number == "0" and not names), None)
        path, base = (v2, root) if v1 is None else (v1, root / "memory")
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
        return tuple(_count(level / name) for level in self.levels)

    def limit(self) -> int | None:
        """Return the lowest limit of these and the groups above; None without a limit."""
        name = "memory.limit_in_bytes" if self.is_v1 else "memory.max"
        places = dict.fromkeys(up for level in self.levels for up in (level, *level.parents))
        return min((size for up in places if (size := _number(up / name))), default=None)

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


def own_group() -> MemoryGroup:
    """Return the cgroup of this process."""
    try:
        return MemoryGroup.own(OWN.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return MemoryGroup(levels=())


def _count(path: Path) -> int | None:
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return next((int(row[1]) for row in rows if row[:1] == ["oom_kill"]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    try:
        found = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found if found < NO_LIMIT else None
