"""Run the measured rank: as a job of clusterrun, or with plain python into a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("rank.py")
START_S = 180.0
LOOK_S = 0.01


@dataclass(kw_only=True)
class Rank:
    """A rank that waits for requests in a directory."""

    desk: Path
    _asked: int = field(default=0, init=False)

    def ask(self, timeout_s: float = 600, **asked: Any) -> dict[str, Any]:
        """Send a request and wait until it is done."""
        answer = self.start(**asked)
        wait_for(answer, timeout_s)
        told: dict[str, Any] = json.loads(answer.read_text())
        return told

    def start(self, **asked: Any) -> Path:
        """Send a request; return the path of a file that appears when it is done."""
        path = self.desk / f"{self._asked}.tmp-ask"
        path.write_text(json.dumps(asked))
        path.rename(self.desk / f"{self._asked}.ask")
        self._asked += 1
        return self.desk / f"{self._asked - 1}.answer"


def wait_for(path: Path, timeout_s: float) -> None:
    """Wait until a file exists.

    Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not appear within {timeout_s:.0f} s")
        time.sleep(LOOK_S)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A running job of one rank."""

    rank: Rank
    run_dir: Path

    @property
    def log(self) -> Path:
        return next((self.run_dir / "logs" / "a1").glob("*.log"))

    def agent_pid(self) -> int:
        """Return the pid of the process that forwards the logs."""
        for path in (self.run_dir / "events").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["type"] == "started":
                    return int(event["pid"])
        raise RuntimeError("the agent has not reported its start")

    def wait_until_forwarded(self, timeout_s: float = 300) -> None:
        """Wait until the log has stopped growing."""
        deadline, size, since = time.monotonic() + timeout_s, -1, time.monotonic()
        while time.monotonic() - since < 1.0:
            now = self.log.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError("the log keeps growing")
            time.sleep(0.05)


@contextmanager
def job(directory: Path, *, runs_dir: Path | None = None) -> Iterator[Job]:
    """Submit a job of one rank on this machine, and cancel it at the end."""
    desk = _desk(directory)
    submitted = [sys.executable, "-m", "clusterrun", "submit", "--parsable", "--cluster", "local"]
    submitted += ["--nodes", "1", "--nproc-per-node", "1", "--device", "cpu", "--strategy", "none"]
    submitted += ["--run-dir", str(runs_dir or directory / "runs")]
    submitted += [str(RANK), str(desk)]
    done = subprocess.run(submitted, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the job could not be submitted: {done.stderr}")
    job_id = done.stdout.strip()
    run_dir = ((runs_dir or directory / "runs") / "by-job" / job_id).resolve()
    try:
        wait_for(desk / "here", START_S)
        found = Job(rank=Rank(desk=desk), run_dir=run_dir)
        yield found
        found.rank.ask(end=True)
    finally:
        cancel = [sys.executable, "-m", "clusterrun", "cancel", "--yes", str(run_dir)]
        if not (run_dir / "end.json").exists():
            _wait_for_end(run_dir, cancel, directory)


def _wait_for_end(run_dir: Path, cancel: list[str], directory: Path) -> None:
    try:
        wait_for(run_dir / "end.json", 30)
    except TimeoutError:
        subprocess.run(cancel, cwd=directory, capture_output=True, check=False)


@contextmanager
def plain(directory: Path, *flags: str) -> Iterator[Rank]:
    """Run the same script with plain python, its output in a file beside the job's spool."""
    desk = _desk(directory)
    out = desk / "out.txt"
    with out.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, *flags, str(RANK), str(desk)],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(desk / "here", START_S)
        rank = Rank(desk=desk)
        yield rank
        rank.ask(end=True)
        child.wait(timeout=60)
    finally:
        child.kill()
        child.wait()
        out.unlink()


def _desk(directory: Path) -> Path:
    desk = directory / f"desk-{os.getpid()}-{time.monotonic_ns()}"
    desk.mkdir(parents=True)
    return desk
