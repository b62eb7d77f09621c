"""Measure a rank from the start of its process to its end, imports included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Section, Value, median, spread
from clusterrun.rundir.paths import RunPaths

SCRIPT = """
import sys
import torch
for number in range(int(sys.argv[1])):
    print(sys.argv[2])
"""
LOADS = ((100_000, 60), (1_000_000, 100))
# What the agent's thread does, in a separate process, as in the agent.
FORWARDER = """
import sys
from pathlib import Path
from clusterrun.node.base.identity import Attempt
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.member import Clock
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import on_slurm
from tests.node.jobs import who
root = Path(sys.argv[1])
plan = on_slurm(gpus_per_node=1)
attempt = Attempt(plan=plan, paths=RunPaths(root=root), number=1, who=who(0, "n1"))
thread = Forwarder(attempt, Spool(root=root / "spool"), Clock())
thread.start()
print("ready", flush=True)
sys.stdin.read()
sys.exit(not thread.finish(60))
"""


def finish(directory: Path, *, runs: int, scale: float) -> Section:
    """Compare a rank as the launcher starts it with the same script in plain python, in turns."""
    with TemporaryDirectory(dir=directory) as name:
        place = Path(name)
        (place / "rank.py").write_text(SCRIPT)
        rows = [
            _row(place, max(int(lines * scale), 1000), width, runs=runs) for lines, width in LOADS
        ]
    return Section(
        title="When a rank that prints is over",
        about="From the start of the process to its end: `clusterrun.rank.worker SCRIPT`, as our "
        "launcher starts it, with a forwarder beside it, and `python -u SCRIPT`, as torchrun does, "
        "into a file of the same file system. The script imports torch, prints, and exits. "
        f"In turns, {runs} pairs. Budget: a median ratio of 1.05.",
        rows=rows,
    )


def _row(place: Path, lines: int, width: int, *, runs: int) -> dict[str, Value]:
    script = [str(place / "rank.py"), str(lines), "x" * (width - 1)]
    ours, plain = [], []
    with _forwarder(place) as env:
        for _ in range(runs + 1):
            ours.append(_seconds(["-m", "clusterrun.rank.worker", *script], env, os.devnull))
            plain.append(_seconds(["-u", *script], dict(os.environ), str(place / "plain.out")))
            _wait_until_forwarded(place, lines * width * len(ours))
    ratios = [one / other for one, other in zip(ours[1:], plain[1:], strict=True)]
    return {
        "load": f"{lines:,} lines of {width} bytes",
        "ours_s": median(ours[1:]),
        "plain_s": median(plain[1:]),
        "ratio": median(ratios),
        "ratios": spread(ratios),
        "pairs": runs,
    }


def _seconds(arguments: Sequence[str], env: dict[str, str], output: str) -> float:
    with open(output, "wb") as file:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], env=env, stdout=file, stdin=subprocess.DEVNULL, check=True
        )
        return time.perf_counter() - begin


@contextmanager
def _forwarder(place: Path) -> Iterator[dict[str, str]]:
    """Run a forwarder, and yield the environment of its rank."""
    with TemporaryDirectory(dir=place) as name:
        root = Path(name)
        (root / "spool").mkdir()
        child = subprocess.Popen(
            [sys.executable, "-c", FORWARDER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        (place / "log").unlink(missing_ok=True)
        (place / "log").symlink_to(RunPaths(root=root).log(1, "n1"))
        try:
            yield {**os.environ, "CLUSTERRUN_SPOOL": str(root / "spool"), "RANK": "0"}
        finally:
            child.stdin.close()
            if child.wait(timeout=120):
                raise RuntimeError("the forwarder could not write everything that the rank printed")


def _wait_until_forwarded(place: Path, size: int) -> None:
    """Wait until a rank's output is forwarded, so that it does not slow the next."""
    deadline = time.monotonic() + 60
    while not (place / "log").exists() or (place / "log").stat().st_size < size:
        if time.monotonic() > deadline:
            raise TimeoutError("the forwarder does not catch up")
        time.sleep(0.05)
