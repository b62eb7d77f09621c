"""Measure what log forwarding costs a rank that prints."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.logs.job import Job, Rank, job, plain
from benchmarks.report import Section, Value, median, spread

FULL_MB = 16
LEAVE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """The lines that the rank prints; `width` includes the newline."""

    lines: int
    width: int
    buffering: str

    @property
    def name(self) -> str:
        how = "line by line" if self.buffering == "own" else "blocks of 8 KiB"
        return f"{self.lines:,} lines of {self.width} bytes, {how}"

    def ask(self, rank: Rank) -> dict[str, Any]:
        """Make a rank print the load."""
        return rank.ask(lines=self.lines, width=self.width, buffering=self.buffering)


def loads(scale: float) -> list[Load]:
    """Return short lines and much text, each written in both ways."""
    return [
        Load(lines=max(int(lines * scale), 1000), width=width, buffering=buffering)
        for lines, width in ((100_000, 60), (1_000_000, 100))
        for buffering in ("own", "block")
    ]


def cost(directory: Path, *, runs: int, scale: float) -> Section:
    """Compare a rank under clusterrun with plain python, in turns."""
    rows: list[dict[str, Value]] = []
    with ExitStack() as stack:
        running = stack.enter_context(job(directory))
        alone, other = (stack.enter_context(plain(directory, "-u")) for _ in range(2))
        for load in loads(scale):
            rows.append(_row(load, "clusterrun : python", _pairs(load, runs, running, alone)))
        noise = loads(scale)[-1]
        rows.append(_row(noise, "python : python (noise)", _pairs(noise, runs, other, alone)))
        rows += [_stopped(load, runs, running, alone) for load in loads(scale)[2:]]
        rows += [_full(load, directory, runs, alone) for load in loads(scale)[2:]]
    return Section(
        title="What the logs cost a rank that prints",
        about="The same script under clusterrun, with its forwarder on the same machine, and under "
        "plain python, writing to a file in the same file system; the rank times its own printing. "
        "Plain python gets `-u`, as torchrun starts ranks: two writes a line, not one; "
        "with blocks, the script opens the same descriptor with a buffer, in both. "
        f"In turns, {runs} pairs. Budget: a median ratio of 1.05.",
        rows=rows,
    )


def _pairs(
    load: Load, runs: int, first: Job | Rank, alone: Rank
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run both in turns, in alternating order, with nothing else running."""
    found = []
    for number in range(runs + 1):
        if number % 2:
            theirs = load.ask(alone)
            ours = _ask(load, first)
        else:
            ours = _ask(load, first)
            theirs = load.ask(alone)
        found.append((ours, theirs))
    return found[1:]  # the first warms up


def _ask(load: Load, one: Job | Rank) -> dict[str, Any]:
    if isinstance(one, Rank):
        return load.ask(one)
    told = load.ask(one.rank)
    one.wait_until_forwarded()
    return told


def _row(
    load: Load, what: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> dict[str, Value]:
    ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]
    return {
        "load": load.name,
        "pair": what,
        "ours_s": median([ours["seconds"] for ours, _ in pairs]),
        "plain_s": median([theirs["seconds"] for _, theirs in pairs]),
        "ratio": median(ratios),
        "ratios": spread(ratios),
        "cpu_ratio": median([o["cpu_seconds"] / t["cpu_seconds"] for o, t in pairs]),
        "pairs": len(pairs),
    }


def _stopped(load: Load, runs: int, running: Job, alone: Rank) -> dict[str, Value]:
    """Print while the agent is stopped."""
    pid = running.agent_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        pairs = _pairs(load, runs, running.rank, alone)
    finally:
        os.kill(pid, signal.SIGCONT)
    running.wait_until_forwarded()
    return _row(load, "agent stopped : python", pairs)


def _full(load: Load, directory: Path, runs: int, alone: Rank) -> dict[str, Value]:
    """Print while the file system of the run directory is full; needs root."""
    what = "run directory full : python"
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(_small_disk(directory / "full"))
        except PermissionError as error:
            return {"load": load.name, "pair": f"{what}: not measured, {error}"}
        running = stack.enter_context(job(directory, runs_dir=disk / "runs"))
        filler = disk / "filler"
        try:
            _fill(filler)
            pairs = _pairs(load, runs, running.rank, alone)
        finally:
            filler.unlink()
    return _row(load, what, pairs)


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    """Mount a disk in memory.

    Raises PermissionError.
    """
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={FULL_MB}m", "tmpfs", str(place)]
    mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
    if mounted.returncode:
        place.rmdir()
        raise PermissionError("only root may mount a small file system")
    try:
        yield place
    finally:
        _unmount(place)
        place.rmdir()


def _unmount(place: Path) -> None:
    """Unmount a disk once the job's processes no longer use it."""
    deadline = time.monotonic() + LEAVE_S
    while subprocess.run(["umount", place], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{place} is still in use")
        time.sleep(0.1)


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:  # full
            return
