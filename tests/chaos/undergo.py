"""Submit a training, hurt it at a step between two checkpoints, and wait until it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault, Scene
from tests.chaos.training import Training, add_scripts
from tests.cluster.cluster import OVER, Cluster
from tests.namespaces import small_disk
from tests.patience import patience, wait_for
from tests.road import Project, project

DISK_MIB = 128
OVER_S = 300.0


@dataclass(frozen=True, kw_only=True)
class SeenState:
    """What Slurm said of a job of the run, and when it was first seen."""

    at: float
    job_id: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Undergone:
    """A training that is over, and when it was hurt."""

    training: Training
    hurt_at: float
    state: str
    jobs: list[SeenState]


@contextmanager
def stage(directory: Path, cluster: Cluster) -> Iterator[Project]:
    """Make a project whose runs lie on a small file system; leave no job and no fault behind."""
    here = add_scripts(project(directory / "project", directory / "state"))
    with small_disk(here.path / "runs", DISK_MIB):
        try:
            yield here
        finally:
            cluster.run(["scancel", "--me"])


def undergo(fault: Fault, here: Project, cluster: Cluster) -> Undergone:
    """Train under one fault."""
    training = fault.submit(here, *fault.options, script=fault.script, steps=fault.steps)
    scene = Scene(cluster=cluster, training=training)
    with scene.undo:
        training.wait_for_step(fault.at, 1)
        hurt_at = fault.inject(scene)
        jobs = wait_until_over(training, cluster)
        for neighbour in training.neighbours:
            wait_until_over(neighbour, cluster)
    return Undergone(
        training=training,
        hurt_at=hurt_at,
        state=wait_for(lambda: last_state(training), "the run's last state"),
        jobs=jobs,
    )


def last_state(training: Training) -> str:
    """Return the run's state, "" while a shared answer of Slurm is older than the end."""
    state = str(training.status()["state"])
    return "" if state == "COMPLETING" else state


def wait_until_over(
    training: Training, cluster: Cluster, timeout_s: float = OVER_S
) -> list[SeenState]:
    """Wait until the run's newest job is over and no other has followed it; tell its states."""
    deadline = time.monotonic() + timeout_s * patience()
    seen: list[SeenState] = []
    while True:
        newest = training.job_ids[-1]
        state = cluster.job_state(newest)
        if not seen or (newest, state) != (seen[-1].job_id, seen[-1].state):
            seen.append(SeenState(at=time.time(), job_id=newest, state=state))
        if state in OVER and training.job_ids[-1] == newest:
            return seen
        cluster.start_requeued(newest)
        if state == "COMPLETING" and (training.root / "end.json").exists():
            cluster.heal()  # Slurm would go on to wait for a node that was lost on the way
        assert time.monotonic() < deadline, f"job {newest} is {state} after {timeout_s:.0f} s"
        time.sleep(0.2)
