"""Run jobs on several machines: the first host's controller conducts each of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.backends.base import Submission, Where
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.hosts import crew, openssh, project
from clusterrun.backends.hosts.crew import MEET_S, Link, is_this_machine
from clusterrun.backends.local.backend import (
    VISIBLE,
    Controlling,
    LocalBackend,
    identity,
    last_number,
    remember_number,
)
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.rundir.record import Home
from clusterrun.shared import files, shell
from clusterrun.shared.state import JobId, JobState
from clusterrun.shared.typed import decoded

if TYPE_CHECKING:
    from clusterrun.rundir.record import JobRecord

SILENT_S = 120.0  # without a sign of life from a controller elsewhere
CONTROLLER = "clusterrun.backends.hosts.controller"
STOP_S = 60.0
ASSEMBLE_S = 900.0  # for all hosts to answer and to get the project
_LEAVING = {"PBS_JOBID", "LSB_JOBID"}
# What srun needs of the allocation. Its other variables, such as SLURM_GPUS, would size each step.
OF_STARTERS = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", VISIBLE)


@dataclass(frozen=True, kw_only=True)
class HostsBackend(LocalBackend):
    """The jobs of one directory of runs, on several machines.

    `is_shared`: the first host of a new job must see it, and all hosts of a smoke job.
    """

    is_shared: bool = False

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Start the controller on the first host and wait until it has accepted the job."""
        needed = plan.hosts if plan.is_smoke else plan.hosts[:1]
        return self._send(plan, paths, must_see=needed if self.is_shared else ())

    def submit_again(self, plan: Plan, record: JobRecord, **_: object) -> Submission:
        """Start another controller for a run, under a new id."""
        return self._send(plan, record.paths, must_see=plan.hosts[:1])

    def _send(self, plan: Plan, paths: RunPaths, *, must_see: Sequence[str]) -> Submission:
        host, is_given = plan.hosts[0], not plan.cluster.scheduler.outlives_shell
        # An allocation's hosts are reached from this machine, by the scheduler's program.
        is_here = is_given or is_this_machine(host)
        first = Link(
            name=host,
            argv=crew.host_command(plan, 0, is_here=is_here),
            env=scrubbed(os.environ, keep=OF_STARTERS if is_given else ()) if is_here else None,
            script=crew.script(CONTROLLER, plan, paths),
        )
        first.start()
        try:
            new, notes = _negotiate(first, plan, paths, must_see, last_number(self.runs_dir))
            if not first.send("go"):
                raise first.explained()
        except BaseException:
            first.close(STOP_S)
            raise
        with contextlib.suppress(KeyboardInterrupt):  # the job runs: its id must be recorded
            first.close(STOP_S)
        remember_number(new.job_id.number)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)  # noqa: T201
        return new

    def _signal_elsewhere(
        self, job_id: str, paths: RunPaths, controller: Controlling, number: int
    ) -> None:
        del job_id
        state, reason = self._state_elsewhere(paths, controller)
        if state is JobState.UNKNOWN:  # another process may have its number by now
            raise SchedulerUnreachableError(reason)
        plan = read_plan(paths)
        host = plan.hosts[0] if plan.cluster.scheduler.outlives_shell else controller.host
        argv = openssh.ssh(host, ("kill", f"-{int(number)}", str(controller.pid)))
        done = shell.run_once(argv, STOP_S)
        if done.rc and "no such process" not in done.stderr.lower():
            raise openssh.silent(host, done.stderr)

    def _state_elsewhere(self, paths: RunPaths, controller: Controlling) -> tuple[JobState, str]:
        host = controller.host
        age = time.time() - paths.controller.stat().st_mtime
        if age < SILENT_S:
            return JobState.RUNNING, controller.waits
        return JobState.UNKNOWN, f"its controller on {host} has been silent for {age:.0f} s"


def backend(where: Where) -> HostsBackend:
    """Return the backend of this package."""
    return HostsBackend(runs_dir=where.runs_dir, is_shared=where.is_shared)


def _negotiate(
    first: Link, plan: Plan, paths: RunPaths, must_see: Sequence[str], last_id: int
) -> tuple[Submission, list[str]]:
    """Send the job; return what became of it, and notes. Raises ClusterrunError."""
    # The process that ends with an allocation whose scheduler may leave others behind.
    leader, is_given = os.getsid(0), not plan.cluster.scheduler.outlives_shell
    is_watched = is_given and not _LEAVING.isdisjoint(os.environ) and leader not in (0, os.getpid())
    nonce = secrets.token_hex(16)
    texts = {path.name: path.read_text() for path in paths.config_files if path.exists()}
    texts[paths.plan.name] = plan.to_json()
    files.write_whole(paths.nonce(nonce), "")
    try:
        fields = first.ask(
            "submit",
            within_s=MEET_S,
            run_dir=str(paths.root),
            nonce=nonce,
            files=texts,
            values={name: os.environ[name] for name in plan.pass_env if name in os.environ},
            argv=(files.read_json(paths.record) or {}).get("argv", []),
            must_see=must_see,
            last_id=last_id,
            shell=(leader, identity(leader)) if is_watched else None,
        )
    finally:
        paths.nonce(nonce).unlink(missing_ok=True)
    try:
        is_here = decoded(bool, fields.get("is_here"))
        notes = [] if is_here else _send_project(first, plan)
        answer = first.answered(ASSEMBLE_S)
        job_id = JobId(answer.get("job_id"))
        home: Home = decoded(Home, {**answer, "host": plan.hosts[0]})
        if not job_id.startswith("H") or job_id.number <= last_id:
            raise ValueError("another job has this id")
    except ValueError as error:
        raise openssh.nonsense(plan.hosts[0]) from error
    return Submission(job_id=job_id, home=None if is_here else home), notes


def _send_project(first: Link, plan: Plan) -> list[str]:
    """Send the project; return notes on what is not copied. Raises ClusterrunError."""
    found = project.find_project(Path(plan.workdir), leave_out=[Path(plan.runs_dir)])
    notes = project.check_paths(found, plan.entry)
    with project.pack(found) as packed:
        first.send_project(packed)
    return [*found.notes, *notes]
