"""Runs in every state, with a Slurm that answers as it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import CommandLine

SQUEUE = "printf '%s\\n' "


def submitted(here: CommandLine, job_id: str = "4711", *argv: str) -> Path:
    """Submit a job to the pretended Slurm and return its run directory."""
    if not (here.bin / "srun").exists():
        here.slurm()
    here.program("sbatch", f"echo {job_id}")
    assert here("submit", *(argv or ("-N2", "train.py"))).code == 0
    return (here.path / "runs" / "by-job" / job_id).resolve()


def queue(here: CommandLine, *rows: str) -> None:
    here.program("squeue", SQUEUE + " ".join(f"'{row}'" for row in rows))


def running(job_id: str = "4711") -> str:
    return f"{job_id}|RUNNING|node[17-18]|5:10:40|1-00:00:00|N/A|N/A|None"


def events(root: Path, *entries: dict[str, Any], node: str = "node17") -> None:
    (root / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    (root / "events").mkdir(exist_ok=True)
    with (root / "events" / f"{node}.jsonl").open("a") as file:
        for entry in entries:
            file.write(json.dumps({"ts": 1.0, "attempt": 1, "node": node, **entry}) + "\n")


def ended(root: Path, state: str, code: int | None) -> None:
    (root / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    data = {"schema": "clusterrun.end/1", "state": state, "exit_code": code, "ended_at": 7.5}
    (root / "end.json").write_text(json.dumps(data))
