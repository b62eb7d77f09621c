"""From a killed rank to the first new step, and the cost of what stays beside the ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Section
from benchmarks.start.place import (
    SCRIPTS,
    Place,
    launched_at,
    sbatch,
    script,
    settle,
    wait_for_files,
)
from benchmarks.start.turns import compared, in_turns, parts
from benchmarks.start.world import ON_CPU, Times, World, known, rank_step
from tests.checkout import EXAMPLES
from tests.cluster.cluster import Cluster

OURS, RESUMED, NEW = "clusterrun, killed rank", "srun python, resuming", "srun python, from step 0"
RANKS = 2
PAIR = World(nodes=2, procs=1, strategy="ddp", budgets=())
GIVEN = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
EVERY = 20
TRAINS_S = 15.0  # before the kill: few runs fail in their first seconds


def restart(place: Place) -> Iterator[Section]:
    """Yield the table of restarts after a killed rank."""
    cluster = place.cluster(2)
    contenders = {
        OURS: partial(_killed, place, cluster),
        RESUMED: partial(_cold, place, cluster, "--resume"),
        NEW: partial(_cold, place, cluster),
    }
    found = in_turns(contenders, place.rounds)
    totals = {name: [known(each["new step_s"]) for each in turns] for name, turns in found.items()}
    rows = compared(totals, OURS, {RESUMED: 0.35, NEW: 0.35})
    for row in rows:
        row |= {k: v for k, v in parts(found[str(row["what"])]).items() if k != "new step_s"}
    yield Section(
        title="From a killed rank to the first new step",
        about="The default example, DDP over gloo on 2 nodes x 1 rank, with its default model. "
        "clusterrun: from the SIGKILL of rank 1, 15 s after its first checkpoint, to the end of "
        "the first step of the next attempt, on the last rank. The floor: fresh interpreters with "
        "the same environment, from slurmd's start of the batch script to the end of the first "
        "step, resuming from the same checkpoint, or from step 0, which also evaluates the "
        "untrained model. Parts, medians: to the start of the last rank's process, to its first "
        "line, from the start of a process to its first collective, and from there to the step.",
        rows=rows,
    )


def project(place: Place, name: str) -> Path:
    """Return a fresh directory with the example and the script that times it."""
    directory = place.fresh(name)
    for source in (*EXAMPLES.glob("*.py"), SCRIPTS / "timed.py"):
        shutil.copy(source, directory)
    (directory / "times").mkdir()
    return directory


def our_words(directory: Path, sleep_s: float, *arguments: str, procs: int = 1) -> tuple[str, ...]:
    """Return the words that submit the timed example to the real Slurm."""
    return (
        *("--cluster", "slurm", "--nodes", "2", "--nproc-per-node", str(procs), "--device", "cpu"),
        *("--cpus-per-task", "8", "--set", "launch.threads_per_process=1", "--time", "20"),
        *("timed.py", str(directory / "times"), str(sleep_s), *arguments),
    )


def _times_of(directory: Path, attempt: int) -> list[Path]:
    return [directory / "times" / f"{attempt}-{rank}.json" for rank in range(RANKS)]


def _killed(place: Place, cluster: Cluster) -> Times:
    """Kill rank 1 once it is past a checkpoint, and wait for the next attempt's first step."""
    directory = project(place, "killed")
    arguments = ("--max-steps", "100000", "--save-every", str(EVERY), "--keep", "2")
    job = place.submit(directory, *our_words(directory, 0.02, *arguments))
    run = (directory / "runs" / "by-job" / job).resolve()
    first = _times_of(directory, 1)
    wait_for_files([*first, run / "checkpoints" / f"step-{EVERY:08d}" / ".complete"], job, cluster)
    time.sleep(TRAINS_S)
    saved = sorted((run / "checkpoints").glob("step-*/.complete"))[-1].parent
    killed_at = time.time()
    os.kill(json.loads(first[1].read_text())["pid"], signal.SIGKILL)
    wait_for_files(_times_of(directory, 2), job, cluster)
    kept = place.directory / "checkpoint"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(saved, kept / saved.name)
    cluster.run(["scancel", job])
    settle(cluster, job)
    times = times_of([json.loads(path.read_text()) for path in _times_of(directory, 2)], killed_at)
    return {**times, **between(_events(run), killed_at)}


def _events(run: Path) -> list[dict[str, Any]]:
    files = (run / "events").glob("*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def between(events: list[dict[str, Any]], killed_at: float) -> Times:
    """Return when the first attempt had ended on all nodes, and when the nodes had met again."""
    ended = [each["ts"] for each in events if (each["type"], each["attempt"]) == ("ended", 1)]
    met = [each["ts"] for each in events if (each["type"], each["attempt"]) == ("rendezvous", 2)]
    return {
        "attempt ended_s": max(ended) - killed_at if ended else None,
        "met again_s": max(met) - killed_at if met else None,
    }


def _cold(place: Place, cluster: Cluster, *resume: str) -> Times:
    """Start the example as Slurm's tasks, with fresh interpreters and nothing else."""
    directory = project(place, "cold")
    if resume:
        shutil.copytree(place.directory / "checkpoint", directory / "checkpoints")
    arguments = ("--max-steps", "100000", "--save-every", str(EVERY))
    where = ("--output", str(directory / "checkpoints"), *resume)
    words = (str(directory / "timed.py"), str(directory / "times"), "0.02", *arguments, *where)
    body = rank_step({**GIVEN, **ON_CPU}, PAIR, *words)
    job = sbatch(script(directory, body, *PAIR.options))
    wait_for_files(_times_of(directory, 1), job, cluster)
    cluster.run(["scancel", job])
    settle(cluster, job)
    began = launched_at(cluster, job)
    return times_of([json.loads(path.read_text()) for path in _times_of(directory, 1)], began)


def times_of(ranks: list[dict[str, float]], began: float) -> Times:
    """Return the times of a start from what its ranks wrote."""
    last = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {
        "new step_s": last["step"] - began,
        "last process_s": last["process"] - began,
        "last script_s": last["script"] - began,
        "process to collective_s": max(r["collective"] - r["process"] for r in ranks),
        "script to collective_s": max(r["collective"] - r["script"] for r in ranks),
        "collective to step_s": max(r["step"] - r["collective"] for r in ranks),
    }
