"""A batch system made of files, and all that clusterrun needs to run jobs on it.

`python files_scheduler.py serve` runs the queue's jobs, one at a time. A job is a directory of
$FILES_QUEUE: `job.json` is its command, `state.json` what it does, `cancel` the request to end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterrun.backends.base import Backend, SchedulerJob, Submission, Where
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.local.controller import LocalStep
from clusterrun.config.choices import Lack, Scheduler
from clusterrun.errors import JobNotFoundError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.processes import adopt_orphans
from clusterrun.node.conductor.agents import Agents
from clusterrun.node.conductor.conductor import Conductor
from clusterrun.node.conductor.host import Host, Signals
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import JobRecord, register_run
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.state import JobId
from clusterrun.shared.typed import decoded

QUEUE = Path(os.environ.get("FILES_QUEUE", "/nowhere"))
SCHEDULER = Scheduler(
    title="the queue of files",
    module=__name__,
    has_queue=True,
    can_requeue=Lack("a job of this queue runs once"),
    shares_files=True,
)


def backend(where: Where) -> FilesBackend:
    """Return what submits, queries and cancels."""
    return FilesBackend()


class FilesBackend(Backend):
    """The jobs of the queue."""

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        return _queue(plan, paths)

    def submit_again(self, plan: Plan, record: JobRecord, **_start: Any) -> Submission:
        return _queue(plan, record.paths)

    def query(self, job_ids: Sequence[str], **_about: Any) -> dict[str, SchedulerJob]:
        found = {job_id: read_json(QUEUE / job_id / "state.json") for job_id in job_ids}
        return {job_id: decoded(SchedulerJob, job) for job_id, job in found.items() if job}

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            if not (QUEUE / job_id).is_dir():
                raise JobNotFoundError(f"the queue has no job {job_id}")
            (QUEUE / job_id / "cancel").touch()


def _queue(plan: Plan, paths: RunPaths) -> Submission:
    number = 1 + sum(1 for _ in QUEUE.iterdir())
    (QUEUE / str(number)).mkdir()
    argv = [plan.python, __file__, "run", str(paths.root), str(number)]
    job = {"argv": argv, "env": scrubbed(os.environ, keep=plan.pass_env)}
    (QUEUE / str(number) / "job.json").write_text(json.dumps(job))
    _note(QUEUE / str(number), state="PENDING", reason="waiting for the queue")
    return Submission(job_id=JobId(str(number)))


def _note(place: Path, **state: Any) -> None:
    job = {"job_id": place.name, "source": "files", "asked_at": time.time(), **state}
    write_whole(place / "state.json", json.dumps(job))


class FilesHost(Host):
    """One job of the queue: each node is a process, as a program like pbsdsh would start it."""

    def __init__(self, paths: RunPaths, plan: Plan, job_id: str) -> None:
        self.paths, self.plan, self.job_id = paths, plan, job_id
        self.nodes = [f"files{rank}" for rank in range(plan.nodes)]
        self.environ = {
            "CLUSTERRUN_HOSTS_JOB_ID": job_id,
            "CLUSTERRUN_HOSTS_NODES": ",".join(self.nodes),
        }

    def start(
        self, attempt: int, *, port: int, is_relaunch: bool, excluded: tuple[str, ...]
    ) -> LocalStep:
        step = LocalStep(paths=self.paths, running={}, lead_s=self.plan.warning_s)
        argv = ["bash", str(self.paths.node_script), str(self.paths.root)]
        argv += [str(attempt), "127.0.0.1", str(port)]
        for rank in range(self.plan.nodes):
            env = {**os.environ, **self.environ, "CLUSTERRUN_HOSTS_NODE_RANK": str(rank)}
            node = subprocess.Popen(argv, cwd=self.plan.workdir, env=env, start_new_session=True)
            step.running[node.pid] = node
        return step

    def register(self) -> None:
        register_run(self.paths.root, self.environ)


def run(root: str, job_id: str) -> int:
    signals = Signals()  # first: a signal must not be lost
    adopt_orphans()
    paths = RunPaths(root=Path(root))
    plan = read_plan(paths)
    host = FilesHost(paths, plan, job_id)
    agents = Agents(paths, plan, job_id, signals.wake)
    return Conductor(paths=paths, plan=plan, host=host, hear=signals.wait, agents=agents).run()


def serve() -> None:
    while True:
        for place in sorted(QUEUE.iterdir(), key=lambda place: int(place.name)):
            if '"PENDING"' in (place / "state.json").read_text():
                _serve(place)
        time.sleep(0.1)


def _serve(place: Path) -> None:
    job, start = read_json(place / "job.json") or {}, time.time()
    process = subprocess.Popen(job["argv"], env=job["env"])
    _note(place, state="RUNNING", start=start)
    was_cancelled = False
    while (code := process.poll()) is None:
        if (place / "cancel").exists() and not was_cancelled:
            was_cancelled = True
            process.terminate()
        time.sleep(0.1)
    state = "CANCELLED" if was_cancelled else "FAILED" if code else "COMPLETED"
    _note(place, state=state, start=start, end=time.time(), exit_code=max(code, 0))


if __name__ == "__main__":
    sys.exit(run(*sys.argv[2:]) if sys.argv[1] == "run" else serve())
