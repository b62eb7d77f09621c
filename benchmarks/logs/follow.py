"""Measure how soon a line reaches the reader's screen, and whether all arrive."""

from __future__ import annotations

import itertools
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.logs.cost import Load
from benchmarks.logs.job import Job, job
from benchmarks.report import Section, Value, median, spread

SEEN_S = 60.0
READ_BYTES = 1 << 20
_NOW = re.compile(rb"^now ([0-9.]+)\r?$", re.MULTILINE)
_NUMBER = re.compile(rb"^([0-9]{8}) x", re.MULTILINE)


@dataclass(kw_only=True)
class Follower:
    """A running `clusterrun logs -f`, and its output with times."""

    child: subprocess.Popen[bytes]
    descriptor: int
    chunks: list[tuple[float, bytes]] = field(default_factory=list)

    def read(self) -> None:
        """Collect the output until the end."""
        while True:
            try:
                block = os.read(self.descriptor, READ_BYTES)
            except OSError:  # a terminal whose other side is closed
                return
            if not block:
                return
            self.chunks.append((time.time(), block))

    @property
    def text(self) -> bytes:
        return b"".join(block for _, block in list(self.chunks))

    @property
    def size(self) -> int:
        return sum(len(block) for _, block in list(self.chunks))

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = SEEN_S) -> bool:
        """Wait until a condition holds; return whether it did."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline or self.child.poll() is not None:
                return holds()
            time.sleep(0.02)
        return True


@contextmanager
def follower(running: Job, *, terminal: bool = False) -> Iterator[Follower]:
    """Follow rank 0 of a job from its last line on."""
    argv = [sys.executable, "-m", "clusterrun", "logs", "-f", str(running.run_dir)]
    argv += ["--rank", "0", "-o", "raw", "-n", "1"]
    ours, theirs = pty.openpty() if terminal else os.pipe()
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    found = Follower(child=child, descriptor=ours)
    thread = threading.Thread(target=found.read)
    thread.start()
    try:
        yield found
    finally:
        child.kill()
        child.wait()
        thread.join()
        os.close(ours)


def follow(directory: Path, *, runs: int, scale: float) -> list[Section]:
    """Measure the delays, the burst and the interruption, in one job."""
    times = max(int(100 * scale), 10)
    burst = Load(lines=max(int(1_000_000 * scale), 1000), width=60, buffering="block")
    with job(directory) as running:
        delays = Section(
            title="From the print to the reader",
            about=f"A rank prints the time every 50 to 500 ms, {times} times; "
            "`clusterrun logs -f --rank 0 -o raw` is read from a pipe and from a terminal.",
            rows=[_delays(running, times, terminal=terminal) for terminal in (False, True)],
        )
        together = Section(
            title="A burst that is followed",
            about=f"{burst.name}, read from a pipe; the ratio is the rank's own time with a "
            "follower over that without, in turns.",
            rows=[_burst(running, burst, runs), _interrupt(running)],
        )
    return [delays, together]


def _delays(running: Job, times: int, *, terminal: bool) -> dict[str, Value]:
    running.rank.ask(times=1, least_s=0.0, most_s=0.0)
    with follower(running, terminal=terminal) as seen:
        if not seen.wait_for(lambda: b"now" in seen.text):
            raise RuntimeError("the follower shows nothing")
        shown = len(_NOW.findall(seen.text))
        running.rank.ask(times=times, least_s=0.05, most_s=0.5)
        seen.wait_for(lambda: len(_NOW.findall(seen.text)) >= shown + times)
        found = _arrivals(seen)[shown:]
    return {
        "reader": "terminal" if terminal else "pipe",
        "median_s": median(found),
        "p95_s": statistics.quantiles(found, n=20, method="inclusive")[-1],
        "most_s": max(found),
        "lines": len(found),
        "lost": times - len(found),
    }


def _arrivals(seen: Follower) -> list[float]:
    """Return the age of each printed time when its last byte arrived."""
    found, rest = [], b""
    for at, block in seen.chunks:
        *lines, rest = (rest + block).split(b"\n")
        found += [at - float(match[1]) for line in lines if (match := _NOW.match(line))]
    return found


def _burst(running: Job, burst: Load, runs: int) -> dict[str, Value]:
    ratios, lates, lost, twice, unordered = [], [], 0, 0, 0
    for _ in range(runs):
        alone = burst.ask(running.rank)["seconds"]
        running.wait_until_forwarded()
        with follower(running) as seen:
            seen.wait_for(lambda: bool(seen.chunks))
            before = len(_NUMBER.findall(seen.text))
            size = seen.size + burst.lines * burst.width
            ratios.append(burst.ask(running.rank)["seconds"] / alone)
            since = time.monotonic()
            seen.wait_for(partial(_has, seen, size))
            lates.append(time.monotonic() - since)
            numbers = [int(n) for n in _NUMBER.findall(seen.text)][before:]
        lost += len(set(range(burst.lines)) - set(numbers))
        twice += len(numbers) - len(set(numbers))
        unordered += sum(b < a for a, b in itertools.pairwise(numbers))
    return {
        "what": f"burst of {burst.lines:,} lines",
        "lost": lost,
        "twice": twice,
        "out_of_order": unordered,
        "rank_ratio": median(ratios),
        "rank_ratios": spread(ratios),
        "last_line_after_s": median(lates),
        "bursts": runs,
    }


def _has(seen: Follower, size_bytes: int) -> bool:
    return seen.size >= size_bytes


def _interrupt(running: Job) -> dict[str, Value]:
    """Interrupt the follower with Ctrl-C and check that the rank still answers."""
    with follower(running) as seen:
        seen.wait_for(lambda: bool(seen.chunks))
        seen.child.send_signal(signal.SIGINT)
        code = seen.child.wait(timeout=SEEN_S)
    running.rank.ask(lines=1, width=60, buffering="own")
    return {"what": f"SIGINT at the follower: it exits {code}, the rank prints on"}
