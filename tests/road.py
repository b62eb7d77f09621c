"""Drive the real command line in a project of its own, on the real Slurm or on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkout import EXAMPLES, ROOT, copy_listed
from tests.patience import finished, patience, wait_for

SCRIPTS = ROOT / "tests" / "scripts"
STUB = ROOT / "tests" / "node" / "stub"
# For what is about agents, batch script or logs: a launcher and ranks that import no torch.
LIGHT = ("--device", "cpu", "--set", "launch.world_contract=false", "--env", f"PYTHONPATH={STUB}")


@dataclass
class Watcher:
    """A command that goes on while the test does, its output in files."""

    process: subprocess.Popen[bytes]
    out_file: Path
    err_file: Path

    @property
    def out(self) -> bytes:
        return self.out_file.read_bytes()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until the command has printed a text, on stdout or stderr."""

        def has_come() -> bool:
            is_over = self.process.poll() is not None
            if text in self.err or text.encode() in self.out:
                return True
            assert not is_over, f"ended with {self.process.returncode} before {text!r}: {self.err}"
            return False

        wait_for(has_come, repr(text))

    def end(self, timeout_s: float = 60) -> int:
        """Wait for its own end and return its exit status."""
        try:
            return self.process.wait(timeout_s * patience())
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still there after {timeout_s} s: {self.err}") from None


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What stands at one place of a log: some bytes, or how many were lost there."""

    text: bytes = b""
    lost: int = 0


@dataclass
class Project:
    """A working directory and what `clusterrun` does in it."""

    path: Path
    environ: Mapping[str, str]
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def here(self) -> dict[str, Any]:
        env = {**self.environ, **self.extra}
        return {"cwd": self.path, "env": env, "stdin": subprocess.DEVNULL}

    def cli(self, *argv: str, timeout_s: float = 240, text: bool = True) -> Any:
        command = [sys.executable, "-m", "clusterrun", *argv]
        return finished(command, timeout_s, text=text, **self.here)

    def ok(self, *argv: str, timeout_s: float = 240, text: bool = True) -> Any:
        done = self.cli(*argv, timeout_s=timeout_s, text=text)
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *argv: str) -> Watcher:
        """Start a command and go on."""
        out, err = (self.path / f"watched-{time.monotonic_ns()}.{end}" for end in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            words = [sys.executable, "-m", "clusterrun", *argv]
            process = subprocess.Popen(words, **self.here, stdout=stdout, stderr=stderr)
        return Watcher(process, out, err)

    def recorded(self, job_id: str, rank: int, stream: str, attempt: int = 1) -> list[Recorded]:
        """Read what the log files say of a rank and stream, by the contract and nothing else."""
        letter = stream[0].encode()
        found = []
        for path in sorted((self.run_dir(job_id) / "logs" / f"a{attempt}").glob("*.log")):
            for record in path.read_bytes().split(b"\n")[:-1]:
                _, of, kind, text = record.split(b" ", 3)
                if of != str(rank).encode():
                    continue
                if kind == b"g" and text.startswith(letter):
                    found.append(Recorded(lost=int(text.split(b" ")[1])))
                elif kind.lower() == letter:
                    found.append(Recorded(text=text if kind.isupper() else text + b"\n"))
        return found

    def raw_logs(self, job_id: str, *argv: str) -> bytes:
        """Return the bytes that `logs` gives for what it is asked."""
        raw: bytes = self.ok("logs", job_id, "-n", "all", "-o", "raw", *argv, text=False)
        return raw

    def written_by(self, rank: int, attempt: int = 1) -> int:
        """Return how many bytes chatter.py has written to stdout by now."""
        try:
            account = (self.path / "said" / f"{attempt}-{rank}").read_bytes()
        except FileNotFoundError:
            return 0
        return struct.unpack("<Q", account)[0] if account else 0

    def json(self, *argv: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok(*argv, "--json"))
        return answer

    def json_lines(self, *argv: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ok(*argv, "--json").split("\n")[:-1]]

    def submit(self, *argv: str) -> str:
        """Submit and return the job id, not waiting."""
        return str(self.ok("submit", "--parsable", *argv)).strip()

    def run_dir(self, job_id: str) -> Path:
        return (self.path / "runs" / "by-job" / job_id).resolve()

    def events(self, job_id: str) -> list[dict[str, Any]]:
        files = sorted((self.run_dir(job_id) / "events").glob("*.jsonl"))
        lines = [line for path in files for line in path.read_text().split("\n")[:-1]]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["ts"])

    def events_of(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events(job_id) if event["type"] == kind]

    def wait_for_line(self, job_id: str, text: str, count: int = 1) -> None:
        """Wait until the text stands `count` times in the log files."""

        def has_come() -> bool:
            logs = self.run_dir(job_id).glob("logs/a*/*.log")
            return sum(path.read_text().count(text) for path in logs) >= count

        wait_for(has_come, f"{text!r}, {count} times, in {self.run_dir(job_id)}")

    def wait_for_event(self, job_id: str, kind: str) -> dict[str, Any]:
        """Wait for the first event of a kind."""
        return wait_for(lambda: self.events_of(job_id, kind), f"an event {kind}")[0]

    def logs(self, job_id: str) -> str:
        text: str = self.ok("logs", job_id, "-a", "-n", "all", "--no-dedup")
        return text


def project(path: Path, state: Path) -> Project:
    """Copy examples and test scripts into a directory that all nodes share."""
    copy_listed(EXAMPLES, path)
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, path)
    home = {"XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state / "config")}
    return Project(path=path, environ={**os.environ, **home})


@pytest.fixture(name="here")
def a_project(tmp_path: Path) -> Project:
    """Give a test a project and a state of its own."""
    return project(tmp_path / "project", tmp_path / "state")


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Find what runs for a job, by the run directory in an environment or among arguments."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            about = [process.environ().get("CLUSTERRUN_RUN_DIR", ""), *process.cmdline()]
            is_over = process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid()
            found += [process] * (str(run_dir) in about and not is_over)
    return found


def wait_for_none(here: Project, job_id: str) -> None:
    """Wait until nothing runs for a job."""
    run_dir = here.run_dir(job_id)
    wait_for(lambda: not processes_of(run_dir), f"the end of all processes of {job_id}", 10)


def descendants(pid: int) -> list[int]:
    """Name a process and all below it, the lowest first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [*(found for child in children for found in descendants(int(child))), pid]
