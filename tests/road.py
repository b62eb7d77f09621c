"""Drive the real command line in a project of its own, on the real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
EXAMPLES = ROOT / "examples"


@dataclass
class Project:
    """A working directory and what `clusterrun` does in it."""

    path: Path
    environ: Mapping[str, str]
    extra: dict[str, str] = field(default_factory=dict)

    def cli(self, *argv: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "clusterrun", *argv],
            cwd=self.path,
            env={**self.environ, **self.extra},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ok(self, *argv: str, timeout_s: float = 240) -> str:
        done = self.cli(*argv, timeout_s=timeout_s)
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *argv: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok(*argv, "--json"))
        return answer

    def submit(self, *argv: str) -> str:
        """Submit and return the job id, not waiting."""
        return self.ok("submit", "--parsable", *argv).strip()

    def run_dir(self, job_id: str) -> Path:
        return (self.path / "runs" / "by-job" / job_id).resolve()

    def events(self, job_id: str) -> list[dict[str, Any]]:
        files = sorted((self.run_dir(job_id) / "events").glob("*.jsonl"))
        lines = [line for path in files for line in path.read_text().split("\n")[:-1]]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["ts"])

    def wait_for_line(self, job_id: str, text: str, count: int = 1) -> None:
        """Wait until the text stands `count` times in the log files."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            logs = self.run_dir(job_id).glob("logs/a*/*.log")
            if sum(path.read_text().count(text) for path in logs) >= count:
                return
            time.sleep(0.1)
        raise AssertionError(f"{text!r} never came {count} times\n{self.logs(job_id)}")

    def wait_for_event(self, job_id: str, kind: str) -> dict[str, Any]:
        """Wait for the first event of a kind."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for event in self.events(job_id):
                if event["type"] == kind:
                    return event
            time.sleep(0.1)
        raise AssertionError(f"no {kind} ever came\n{self.logs(job_id)}")

    def logs(self, job_id: str) -> str:
        return self.ok("logs", job_id, "--all-ranks", "--tail", "all")


def project(path: Path, state: Path) -> Project:
    """Copy examples and test scripts into a directory that all nodes share."""
    shutil.copytree(EXAMPLES, path, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, path)
    home = {"XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state / "config")}
    return Project(path=path, environ={**os.environ, **home})
