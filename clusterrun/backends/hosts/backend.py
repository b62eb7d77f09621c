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

SILENT_S = 120.0  # without a sign of life, it is unknown whether a controller elsewhere runs
CONTROLLER = "clusterrun.backends.hosts.controller"
STOP_S = 60.0
ASSEMBLE_S = 900.0  # for all hosts to answer and to get the project
_END_ONLY_THE_SHELL = {"PBS_JOBID", "LSB_JOBID"}  # set by schedulers that may end nothing else
# What srun needs of the allocation. Its other variables, such as SLURM_GPUS, would size each step.
OF_STARTERS = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", VISIBLE)


@dataclass(frozen=True, kw_only=True)
class HostsBackend(LocalBackend):
    """The jobs of one directory of runs, on several machines."""

    is_shared: bool = False  # the first host of a new job must see `runs_dir`, all of a smoke job

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Start the controller on the first host and wait until it has accepted the job."""
        must_see = plan.hosts if plan.is_smoke else plan.hosts[:1]
        return self._start_controller(plan, paths, must_see if self.is_shared else ())

    def submit_again(self, plan: Plan, record: JobRecord, **_: object) -> Submission:
        """Start another controller for a run, under a new id."""
        return self._start_controller(plan, record.paths, plan.hosts[:1])

    def _start_controller(self, plan: Plan, paths: RunPaths, must_see: Sequence[str]) -> Submission:
        """Start a controller; it refuses a run directory that a host of `must_see` does not see."""
        host, in_allocation = plan.hosts[0], not plan.cluster.scheduler.outlives_shell
        # An allocation's hosts are reached from this machine, by the scheduler's program.
        is_here = in_allocation or is_this_machine(host)
        environ = scrubbed(os.environ, keep=OF_STARTERS if in_allocation else ())
        controller = Link(
            name=host,
            argv=crew.host_command(plan, host, is_here=is_here),
            env=environ if is_here else None,
            script=crew.script(CONTROLLER, plan, paths),
        )
        controller.start()
        try:
            last_job = last_number(self.runs_dir)
            submission, notes = _negotiate(controller, plan, paths, must_see, last_job)
            if not controller.send("go"):  # without it, the controller starts nothing
                raise controller.end_and_explain()
        except BaseException:
            controller.close(STOP_S)
            raise
        with contextlib.suppress(KeyboardInterrupt):  # the job runs: its id must be recorded
            controller.close(STOP_S)
        remember_number(submission.job_id.number)  # jobs submitted from here get larger ones
        for note in notes:
            print(f"note: {note}", file=sys.stderr)  # noqa: T201
        return submission

    def _signal_elsewhere(
        self, job_id: str, paths: RunPaths, controller: Controlling, number: int
    ) -> None:
        """Signal the controller over ssh. Raises SchedulerUnreachableError."""
        del job_id
        state, reason = self._state_elsewhere(paths, controller)
        if state is JobState.UNKNOWN:  # another process may have its pid by now
            raise SchedulerUnreachableError(reason)
        plan = read_plan(paths)
        in_allocation = not plan.cluster.scheduler.outlives_shell
        # In an allocation, the controller is where it was submitted; over ssh, on the first host.
        host = controller.host if in_allocation else plan.hosts[0]  # as ssh knows that host
        argv = openssh.ssh(host, ("kill", f"-{int(number)}", str(controller.pid)))
        done = shell.run_once(argv, STOP_S)
        if done.rc and "no such process" not in done.stderr.lower():
            raise openssh.silent(host, done.stderr)

    def _state_elsewhere(self, paths: RunPaths, controller: Controlling) -> tuple[JobState, str]:
        """Return RUNNING and what the controller waits for; UNKNOWN and why if it is silent."""
        host = controller.host
        age = time.time() - paths.controller.stat().st_mtime  # the controller keeps touching it
        if age < SILENT_S:
            return JobState.RUNNING, controller.waits
        return JobState.UNKNOWN, f"its controller on {host} has been silent for {age:.0f} s"


def backend(where: Where) -> HostsBackend:
    """Return the backend of this package."""
    return HostsBackend(runs_dir=where.runs_dir, is_shared=where.is_shared)


def _negotiate(
    controller: Link, plan: Plan, paths: RunPaths, must_see: Sequence[str], last_job: int
) -> tuple[Submission, list[str]]:
    """Send the job; return its submission, and notes for the user. Raises ClusterrunError.

    The hosts `must_see` must see the run directory; `last_job` is the newest job number used here.
    """
    nonce = secrets.token_hex(16)  # of a file that shows whether the first host sees this directory
    texts = {path.name: path.read_text() for path in paths.config_files if path.exists()}
    texts[paths.plan.name] = plan.to_json()
    files.write_whole(paths.nonce(nonce), "")
    try:
        reply = controller.ask(
            "submit",
            within_s=MEET_S,
            run_dir=str(paths.root),
            nonce=nonce,
            files=texts,
            values={name: os.environ[name] for name in plan.pass_env if name in os.environ},
            argv=(files.read_json(paths.record) or {}).get("argv", []),
            must_see=must_see,
            last_id=last_job,
            shell=_shell_of_allocation(plan),
        )
    finally:
        paths.nonce(nonce).unlink(missing_ok=True)
    try:
        is_here = decoded(bool, reply.get("is_here"))  # the first host sees this directory
        notes = [] if is_here else _send_project(controller, plan)
        answer = controller.answered(ASSEMBLE_S)  # again to "submit", once all hosts are ready
        job_id = JobId(answer.get("job_id"))
        home: Home = decoded(Home, {**answer, "host": plan.hosts[0]})
        if not job_id.startswith("H") or job_id.number <= last_job:  # numbers must grow
            raise ValueError("another job has this id")
    except ValueError as error:
        raise openssh.nonsense(plan.hosts[0]) from error
    return Submission(job_id=job_id, home=None if is_here else home), notes


def _shell_of_allocation(plan: Plan) -> tuple[int, str | None] | None:
    """Return pid and identity of the shell that the run must not outlive; None without one."""
    leader = os.getsid(0)
    if plan.cluster.scheduler.outlives_shell or _END_ONLY_THE_SHELL.isdisjoint(os.environ):
        return None  # there is no allocation, or its scheduler ends the run with it
    # 0: the shell is outside this container. This process: no shell started the command.
    return None if leader in (0, os.getpid()) else (leader, identity(leader))


def _send_project(controller: Link, plan: Plan) -> list[str]:
    """Send the project; return notes on what is not copied. Raises ClusterrunError."""
    files_to_copy = project.find_project(Path(plan.workdir), leave_out=[Path(plan.runs_dir)])
    notes = project.check_paths(files_to_copy, plan.entry)
    with project.pack(files_to_copy) as packed:
        controller.send_project(packed)
    return [*files_to_copy.notes, *notes]
