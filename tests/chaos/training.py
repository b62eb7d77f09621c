"""Train the example as a run of clusterrun, and read from its directory what becomes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.patience import wait_for
from tests.road import Project

# A step of about 25 ms, of which paced.py sleeps most: a fault can be placed between two saves.
STEPS, SAVE_EVERY = 120, 24
SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = "paced.py"
MODEL = (
    *("--layers", "1", "--width", "32", "--heads", "2"),
    *("--seq-len", "32", "--batch-size", "2", "--held-out", "4"),
)
RUN = (
    *("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--device", "cpu"),
    *("--set", "launch.threads_per_process=1"),
)
TRAINED = re.compile(rb"step (\d+)/\d+ loss (\S+) lr (\S+)")
MARKER = ".complete"
SLURM: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


@dataclass(frozen=True, kw_only=True)
class Printed:
    """One optimizer step, as rank 0 printed it; `at` is seconds of the epoch."""

    attempt: int
    at: float
    step: int
    loss: str
    lr: str


@dataclass(kw_only=True)
class Training:
    """One run; `steps` is how many it shall take. `neighbours` are runs that nobody hurts."""

    project: Project
    root: Path
    steps: int
    neighbours: list[Training] = field(default_factory=list)

    # What the files say

    @cached_property
    def first_job_id(self) -> str:
        return self.job_ids[0]

    @property
    def job_ids(self) -> list[str]:
        """Every job of the run, the newest last."""
        record = json.loads((self.root / "job.json").read_text())
        return [*record.get("earlier_job_ids", []), record["job_id"]]

    @property
    def newest_attempt(self) -> int:
        names = [path.name for path in (self.root / "attempts").glob("*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def events(self, *kinds: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """Read events of some kinds, by time; a last line that is being written is left out."""
        found = []
        for path in (self.root / "events").glob("*.jsonl"):
            for line in path.read_text().split("\n")[:-1]:
                event = json.loads(line)
                if event["type"] in kinds and attempt in (None, event["attempt"]):
                    found.append(event)
        return sorted(found, key=lambda event: float(event["ts"]))

    def outcome(self, attempt: int) -> dict[str, Any] | None:
        path = self.root / "attempts" / str(attempt) / "outcome.json"
        if not path.exists():
            return None
        read: dict[str, Any] = json.loads(path.read_text())
        return read

    def world(self, attempt: int) -> list[str]:
        """Name the nodes of an attempt, the head first."""
        path = self.root / "attempts" / str(attempt) / "attempt.json"
        nodes: list[str] = json.loads(path.read_text())["nodes"]
        return nodes

    def printed(self, attempt: int | None = None) -> list[Printed]:
        """List the steps that rank 0 printed, attempt by attempt."""
        attempts = range(1, self.newest_attempt + 1) if attempt is None else [attempt]
        return [line for number in attempts for line in self._printed(number)]

    def _printed(self, attempt: int) -> Iterator[Printed]:
        for path in (self.root / "logs" / f"a{attempt}").glob("*.log"):
            for record in path.read_bytes().split(b"\n")[:-1]:
                at, rank, _, text = record.split(b" ", 3)
                if rank == b"0" and (found := TRAINED.match(text)):
                    step, loss, lr = (part.decode() for part in found.groups())
                    yield Printed(
                        attempt=attempt, at=int(at) / 1e6, step=int(step), loss=loss, lr=lr
                    )

    def saved(self, attempt: int) -> set[int]:
        """List the steps whose checkpoint an attempt completed, or ended with.

        The events of an agent's last moment are lost with it: what the outcome says counts, too.
        """
        steps = {int(event["step"]) for event in self.events("checkpoint", attempt=attempt)}
        known = (self.outcome(attempt) or {}).get("checkpoint")
        return steps | ({int(known)} if known is not None else set())

    def final_bytes(self) -> dict[str, bytes]:
        """Read the last checkpoint, its marker left out, which holds times."""
        directory = self.root / "checkpoints" / f"step-{self.steps:08d}"
        return {
            path.name: path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file() and path.name != MARKER
        }

    def status(self) -> dict[str, Any]:
        return self.project.json("status", self.first_job_id)

    # Waiting

    def wait_for_attempt(self, attempt: int, timeout_s: float = 240) -> None:
        wait_for(lambda: self.newest_attempt >= attempt, f"attempt {attempt}", timeout_s)

    def wait_for_step(self, step: int, attempt: int, timeout_s: float = 240) -> None:
        """Wait until an attempt has printed this step, or a later one."""

        def has_come() -> bool:
            return any(line.step >= step for line in self._printed(attempt))

        wait_for(has_come, f"step {step} of attempt {attempt} of {self.root}", timeout_s)

    # Processes; nodes of the test cluster have no pids of their own

    def rank_pid(self, rank: int, attempt: int) -> int:
        started = self.events("rank_start", attempt=attempt)
        return int(next(event["pid"] for event in started if event["rank"] == rank))

    def agent_pid(self, node: str, attempt: int) -> int:
        started = self.events("started", attempt=attempt)
        return int(next(event["pid"] for event in started if event["node"] == node))


def add_scripts(project: Project) -> Project:
    """Put the scripts that faults need into a project."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, project.path)
    return project


def arguments(steps: int = STEPS) -> tuple[str, ...]:
    """Give the example's own flags; the script comes before them."""
    every = ("--max-steps", str(steps), "--save-every", str(SAVE_EVERY), "--log-every", "1")
    return ("--exact", "--resume", *every, *MODEL)


def submit(project: Project, *options: str, script: str = SCRIPT, steps: int = STEPS) -> Training:
    """Submit the example and return at once."""
    root = project.run_dir(project.submit(*RUN, *options, script, *arguments(steps)))
    return Training(project=project, root=root, steps=steps)


def submit_and_die(
    project: Project, *options: str, script: str = SCRIPT, steps: int = STEPS
) -> Training:
    """Submit from a shell that is killed once Slurm has the job."""
    before = _queued()
    shell = project.start("submit", *RUN, *options, script, *arguments(steps))
    wait_for(lambda: _queued() - before, "the job")
    shell.process.kill()
    shell.process.wait()
    (job_id,) = _queued() - before
    wait_for((project.path / "runs" / "by-job" / job_id).exists, "the job's own registration")
    return Training(project=project, root=project.run_dir(job_id), steps=steps)


def submit_beside_another(project: Project, *options: str, **lengths: Any) -> Training:
    """Submit a run, and on the same two nodes another."""
    nodes = subprocess.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N"], **SLURM).stdout.split()
    where = ("--nodelist", ",".join(nodes[:2]))
    training = submit(project, *where, *options, **lengths)
    training.neighbours.append(submit(project, *where, **lengths))
    return training


def _queued() -> set[str]:
    return set(subprocess.run(["squeue", "--me", "-h", "-o", "%i"], **SLURM).stdout.split())
