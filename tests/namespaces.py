"""Programs and processes of nodes and hosts that are namespaces of this machine.

tests/cluster makes a Slurm of them, tests/hosts machines with an sshd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patience

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# This environment variable marks the processes that the tests start.
MARK = "CLUSTERRUN_TEST_CLUSTER"
PROC = Path("/proc")


class ClusterError(RuntimeError):
    """A program of the test cluster or of the hosts failed, or did not get ready in time."""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end; raise ClusterError with its own words when it fails."""
    try:
        done = subprocess.run(
            list(argv),
            env={**os.environ, "PATH": whole_path(), **(env or {})},
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s * patience(),
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(argv)} did not end in {timeout_s:.0f} s") from error
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise ClusterError(f"{' '.join(argv)} ended with {done.returncode}: {said}")
    return done


def whole_path() -> str:
    """Return PATH with the directories of the daemons, which a plain user's PATH may lack."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def refusal(*kinds: str, script: str) -> str:
    """Return why a script fails in new namespaces of these kinds; "" if it succeeds.

    Nothing remains of them.
    """
    unshare = ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "sh", "-c", script]
    return run(unshare, check=False).stderr.strip()


def ip(lines: Sequence[str], *options: str) -> None:
    """Run commands of ip."""
    run(["ip", *options, "-batch", "-"], stdin="\n".join(lines) + "\n")


def check_empty(directory: Path) -> None:
    """Raise ClusterError for a directory with files, which would be lost."""
    if directory.exists() and any(directory.iterdir()):
        raise ClusterError(f"{directory} holds other files, which would be lost")


# Processes


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process, as the /proc counts that it was read from."""

    pid: int
    parent: int
    uid: int
    state: str
    name: str
    argv: tuple[str, ...]

    @property
    def cmdline(self) -> str:
        return " ".join(self.argv).strip() or f"[{self.name}]"


def read(directory: Path) -> Process | None:
    """Read a process in /proc; None if it has ended."""
    try:
        stat = (directory / "stat").read_text()
        argv = (directory / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        uid = directory.stat().st_uid
    except OSError:
        return None
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)  # it may hold blanks
    state, parent = rest.split()[:2]
    if state == "Z":
        return None
    return Process(
        pid=int(directory.name),
        parent=int(parent),
        uid=uid,
        state=state,
        name=name,
        argv=tuple(argv.split("\0")),
    )


def all_in(proc: Path = PROC) -> list[Process]:
    """Return all processes of a /proc, zombies left out."""
    names = filter(str.isdigit, os.listdir(proc))
    return [found for name in names if (found := read(proc / name))]


def in_namespaces(names: Mapping[str, str]) -> dict[str, list[Process]]:
    """Return the processes of network namespaces (key: name of the namespace), by key."""
    inodes = {}
    for key, netns in names.items():
        path = Path("/run/netns") / netns
        if path.exists():
            inodes[path.stat().st_ino] = key
    found: dict[str, list[Process]] = {key: [] for key in inodes.values()}
    for process in all_in():
        try:
            inode = os.stat(f"/proc/{process.pid}/ns/net").st_ino
        except OSError:  # it ended while we looked
            continue
        if inode in inodes:
            found[inodes[inode]].append(process)
    return found


def marked(value: str) -> list[int]:
    """Return the processes that were started with this value of MARK."""
    mark = f"{MARK}={value}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir(PROC)):
        try:
            environment = (PROC / name / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            found.append(int(name))
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
        waiting = {pid for pid in waiting if read(PROC / str(pid))}
        time.sleep(0.02)
    for pid in waiting:
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may already be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def pid_in(pid_file: Path, name: str) -> int | None:
    """Return the process that a pid file tells of, where it is alive and has this name.

    The name counts because numbers are given out again.
    """
    try:
        process = read(PROC / str(int(pid_file.read_text())))
    except (OSError, ValueError):
        return None
    return process.pid if process and process.name == name else None


# A small file system for run directories


CHUNK = bytes(1 << 20)


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    """A mounted tmpfs, which can be filled and given room again; all nodes see it."""

    root: Path

    def fill(self) -> None:
        """Take all space that is left, to the last byte."""
        with open(self.root / ".filler", "ab", buffering=0) as file:
            size = len(CHUNK)
            while size:
                try:
                    file.write(CHUNK[:size])
                except OSError:  # no space: smaller pieces, down to one byte
                    size //= 2

    def free(self) -> None:
        """Give the space back."""
        (self.root / ".filler").unlink(missing_ok=True)


@contextmanager
def small_disk(root: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Mount one on a directory that is made for it; needs root."""
    root.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(root)])
    try:
        yield SmallDisk(root=root)
    finally:
        run(["umount", "--lazy", str(root)])
