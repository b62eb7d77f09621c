"""Runs in every state, with a Slurm that answers as it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.events import ENDED_BY, Phase
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import Alert, AlertKind, GpuSample, Sample, to_line
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
    return f"{job_id}|RUNNING|node[17-18]|5:10:40|1-00:00:00|N/A|N/A|||None"


def events(root: Path, *entries: dict[str, Any], node: str = "node17") -> None:
    (root / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    (root / "events").mkdir(exist_ok=True)
    with (root / "events" / f"{node}.jsonl").open("a") as file:
        for entry in entries:
            file.write(json.dumps({"ts": 1.0, "attempt": 1, "node": node, **entry}) + "\n")


def started(root: Path, ends: Mapping[Phase, float], attempt: int = 1) -> None:
    """Write what the head recorded of a start."""
    paths = RunPaths(root=root)
    paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
    known = {"nodes": ("node17", "node18"), "procs_per_node": 4}
    amend_attempt(paths, attempt, owner="4711", taken_at=ends.get(Phase.PROLOG), **known)
    fields: dict[Phase, dict[str, Any]] = {
        Phase.SETUP: {"job_start": ends.get(Phase.QUEUE), "staged_at": ends.get(Phase.STAGE)},
        Phase.RENDEZVOUS: {
            "waited_s": ends.get(Phase.RENDEZVOUS, 0.0) - ends.get(Phase.IMPORTS, 0.0)
        },
    }
    for kind, phase in ENDED_BY.items():
        if phase in ends:
            about = {"type": kind.value, "ts": ends[phase], "attempt": attempt}
            events(root, {**about, **fields.get(phase, {})})


def ended(root: Path, state: str, code: int | None, *, at: float = 7.5) -> None:
    (root / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    data = {"schema": "clusterrun.end/1", "state": state, "exit_code": code, "ended_at": at}
    (root / "end.json").write_text(json.dumps(data))


GIB = 1 << 30


def sampled(root: Path, attempt: int = 1, *, node: str = "node17", host: int = 620) -> None:
    """Write what a node of 2,000 GiB uses now; its peak was 100 GiB more, that of its GPU 70."""
    gpu = GpuSample(
        index=2,
        memory_bytes=51 * GIB,
        memory_total_bytes=80 * GIB,
        memory_peak_bytes=70 * GIB,
        activity=90.5,
    )
    sample = Sample(
        at=1e9,
        attempt=attempt,
        host_bytes=host * GIB,
        host_limit_bytes=2000 * GIB,
        host_peak_bytes=(host + 100) * GIB,
        cpus=64,
        ranks=((0, 5),),
        gpus=(gpu,),
        alerts=(Alert(kind=AlertKind.GPU_MEMORY, gpu=2, at=9e8),),
    )
    path = RunPaths(root=root).usage(node)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(to_line(sample))
