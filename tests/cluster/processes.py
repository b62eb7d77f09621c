"""Find and end the processes of a cluster by what the kernel says of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patience

# The environment variable by which the daemons of a cluster are told from all other processes.
MARK = "CLUSTERRUN_TEST_CLUSTER"
INFRASTRUCTURE = frozenset({"slurmd", "slurmstepd"})


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process that lives on a node."""

    pid: int
    name: str
    cmdline: str
    state: str

    @property
    def infrastructure(self) -> bool:
        """Return whether Slurm itself started this process for its own use."""
        return self.name in INFRASTRUCTURE


def namespaces_of(names: Mapping[str, str]) -> dict[int, str]:
    """Map the inode of each network namespace to its key in `names` (key: namespace name)."""
    found = {}
    for key, netns in names.items():
        path = Path("/run/netns") / netns
        if path.exists():
            found[path.stat().st_ino] = key
    return found


def in_namespaces(inodes: Mapping[int, str]) -> dict[str, list[Process]]:
    """Return the processes of each network namespace, zombies left out."""
    found: dict[str, list[Process]] = {key: [] for key in inodes.values()}
    for pid in _pids():
        try:
            key = inodes.get(os.stat(f"/proc/{pid}/ns/net").st_ino)
            process = _process(pid) if key is not None else None
        except OSError:  # it ended while we looked
            continue
        if key is not None and process is not None and process.state != "Z":
            found[key].append(process)
    return found


def marked(value: str) -> list[int]:
    """Return the processes that were started with this value of MARK."""
    mark = f"{MARK}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            found.append(pid)
    return found


def kill(pids: Iterable[int], *, number: int = signal.SIGKILL, timeout_s: float = 10) -> None:
    """Send a signal to each process and wait until all are gone.

    Children come first: the kernel wakes a stopped one, and tells it, when its parent is gone.
    """
    waiting = set(pids) - {os.getpid()}
    for pid in sorted(waiting, reverse=True):
        send(pid, number)
    deadline = time.monotonic() + timeout_s * patience()
    while waiting and time.monotonic() < deadline:
        waiting = {pid for pid in waiting if alive(pid)}
        time.sleep(0.02)
    for pid in waiting:
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may already be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return _process(pid).state != "Z"
    except OSError:
        return False


def pid_in(pid_file: Path, name: str) -> int | None:
    """Return the process that a pid file tells of, where it is alive and has this name.

    The name counts because numbers are given out again.
    """
    try:
        pid = int(pid_file.read_text())
        process = _process(pid)
    except (OSError, ValueError):
        return None
    return pid if process.name == name and process.state != "Z" else None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _process(pid: int) -> Process:
    """Read /proc; the name stands in parentheses and may hold blanks."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    cmdline = (
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    )
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
    return Process(
        pid=pid, name=name, cmdline=cmdline.strip() or f"[{name}]", state=rest.split()[0]
    )
