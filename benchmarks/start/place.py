"""Where the measurements take place: a directory, and a test cluster of the size they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.shape import Shape, default_state_dir

CLUSTERRUN = str(Path(sys.executable).with_name("clusterrun"))
SCRIPTS = Path(__file__).with_name("scripts")
LAUNCHING = "Launching batch job {} for UID"
JOB_S = 600.0
LOOK_S = 0.02


@dataclass(kw_only=True)
class Place:
    """A directory for the jobs, and the cluster that is up."""

    directory: Path
    rounds: int
    slot: int
    seconds: float
    large: int
    options: tuple[str, ...]
    launchers: tuple[str, ...] = ()
    only: str = ""

    def ways(self, ours: str) -> dict[str, tuple[str, ...]]:
        """Return the options of our jobs: as they are, and with each launcher asked for."""
        chosen = {
            f"{ours}, {name}": ("--set", f"launch.launcher={name}") for name in self.launchers
        }
        return {ours: (), **chosen}

    def cluster(self, nodes: int) -> Cluster:
        """Return an idle cluster of this many nodes; one of another size is taken down."""
        shape = Shape(state_dir=default_state_dir(self.slot), slot=self.slot, nodes=nodes)
        cluster = Cluster(shape=shape)
        cluster.up()
        os.environ |= cluster.env
        return cluster

    def down(self) -> None:
        """Take down the cluster that is up."""
        if found := Cluster.existing(default_state_dir(self.slot)):
            found.down()

    def fresh(self, name: str) -> Path:
        """Return a new directory with this name; one of an earlier turn is removed."""
        directory = self.directory / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory

    def submit(self, directory: Path, *words: str) -> str:
        """Submit with clusterrun from a directory and return the job id."""
        argv = [CLUSTERRUN, "submit", "--parsable", *self.options, *words]
        done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"submit ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout.strip()


def script(directory: Path, text: str, *options: str) -> list[str]:
    """Write a batch script; return the command that submits it."""
    path = directory / "job.sh"
    path.write_text("#!/bin/bash\n" + text)
    return ["sbatch", "--parsable", "-o", str(directory / "batch.out"), *options, str(path)]


def sbatch(argv: Sequence[str]) -> str:
    """Submit a batch script and return the job id."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def launched_at(cluster: Cluster, job_id: str) -> float:
    """Return when slurmd began to start a job's batch script, by its log; in epoch seconds."""
    text = LAUNCHING.format(job_id)
    for log in (cluster.shape.state_dir / "log").glob("slurmd-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if text in line:
                return datetime.fromisoformat(line[1:].partition("]")[0]).timestamp()
    raise RuntimeError(f"no slurmd has logged the start of job {job_id}")


def wait_for_files(paths: Sequence[Path], job: str, cluster: Cluster) -> None:
    """Wait until all files exist. Raises RuntimeError if the job ends first, or takes too long."""
    deadline, missing, looked = time.monotonic() + JOB_S, list(paths), time.monotonic()
    while missing := [path for path in missing if not path.exists()]:
        time.sleep(LOOK_S)
        if time.monotonic() - looked < 2:
            continue
        looked = time.monotonic()
        state = cluster.job_state(job)
        if state not in ("PENDING", "RUNNING", "COMPLETING") and not missing[0].exists():
            raise RuntimeError(f"job {job} is {state}; {missing[0]} is missing")
        if looked > deadline:
            raise RuntimeError(f"job {job} has not written {missing[0]} in {JOB_S:.0f} s")


def settle(cluster: Cluster, job: str) -> str:
    """Wait until a job has ended and nothing of it is left; return its state."""
    state = cluster.wait_job(job, timeout_s=JOB_S)
    cluster.wait_no_processes(60)
    deadline = time.monotonic() + 60
    while set(cluster.node_states().values()) != {"IDLE"} and time.monotonic() < deadline:
        time.sleep(0.1)
    return state
