"""Run a command and measure it from outside: time, processor time, memory, bytes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

READ_BYTES = 1 << 20
LOOK_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The cost of a command; `rss` is that of the largest process, `rss_sum` the sum of all."""

    wall_s: float
    first_byte_s: float | None
    cpu_s: float
    rss_bytes: int
    rss_sum_bytes: int
    out_bytes: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to measure, with its output in a pipe that is read or in /dev/null."""

    name: str
    argv: Sequence[str]
    to_null: bool = False
    cwd: Path | None = None
    accepts: tuple[int, ...] = (0,)


def measure(command: Command, *, watch_memory: bool = False) -> Measured:
    """Run a command to its end.

    Raises RuntimeError with its error output if it fails. The kernel counts the memory of this
    process, which starts it, as a minimum: about 30 MB.
    """
    with open(os.devnull, "wb") as null:
        begin = time.perf_counter()
        child = subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=null if command.to_null else subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    errors: list[bytes] = []
    assert child.stderr is not None
    hearing = _in_thread(lambda: errors.append(child.stderr.read()))  # type: ignore[union-attr]  # asserted above
    peaks: dict[int, int] = {}
    watching = _in_thread(lambda: _watch(child.pid, peaks)) if watch_memory else None
    first, count = _read(child, begin)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    hearing.join()
    if watching:
        watching.join()
    if child.returncode not in command.accepts:
        said = b"".join(errors).decode(errors="replace")[-2000:]
        raise RuntimeError(f"{command.name} ended with {child.returncode}: {said}")
    rss = usage.ru_maxrss * 1024
    return Measured(
        wall_s=wall,
        first_byte_s=first,
        cpu_s=usage.ru_utime + usage.ru_stime,
        rss_bytes=rss,
        rss_sum_bytes=max(sum(peaks.values()), rss),
        out_bytes=count,
    )


def _in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _read(child: subprocess.Popen[bytes], begin: float) -> tuple[float | None, int]:
    if child.stdout is None:
        return None, 0
    first, count, room = None, 0, bytearray(READ_BYTES)
    with child.stdout:
        while size := os.readv(child.stdout.fileno(), [room]):
            if first is None:
                first = time.perf_counter() - begin
            count += size
    return first, count


def _watch(pid: int, peaks: dict[int, int]) -> None:
    """Record the peak resident size of each descendant of a process until it ends."""
    try:
        root = psutil.Process(pid)
        while root.status() != psutil.STATUS_ZOMBIE:
            for process in [root, *root.children(recursive=True)]:
                peaks[process.pid] = max(peaks.get(process.pid, 0), _peak(process.pid))
            time.sleep(LOOK_S)
    except psutil.Error:
        return


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0")
    return int(line.split()[1]) * 1024


def elsewhere(work: Callable[..., T], *args: object, **named: object) -> T:
    """Call a function in a separate process, so that this one stays small (see `measure`)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **named).result()


def interleaved(commands: Sequence[Command], runs: int) -> dict[str, list[Measured]]:
    """Measure commands in turns, so that other load of the machine affects all alike."""
    found: dict[str, list[Measured]] = {command.name: [] for command in commands}
    for _ in range(runs):
        for command in commands:
            found[command.name].append(measure(command))
    return found
