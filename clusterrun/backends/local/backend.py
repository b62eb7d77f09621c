"""Run jobs on this machine: a detached controller simulates each node with a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterrun.backends.base import Backend, SchedulerJob, Submission, Where
from clusterrun.backends.environment import scrubbed
from clusterrun.backends.local import process
from clusterrun.backends.local.job_ids import take_job_id
from clusterrun.config.choices import Device
from clusterrun.errors import ClusterrunError, JobNotFoundError, SubmissionError
from clusterrun.launch.plan import Plan
from clusterrun.rundir import reading
from clusterrun.rundir.outcome import read_end
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import files, shell
from clusterrun.shared.job_id import JobId
from clusterrun.shared.state import JobState

if TYPE_CHECKING:
    from clusterrun.rundir.record import JobRecord

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCHEMA = "clusterrun.controller/1"
START_S = 60.0
STOP_S = 15.0
MOST_PIDS = 1 << 22  # of Linux


@dataclass(frozen=True, kw_only=True)
class Controlling:
    """The process that controls a job; `is_gone`: it was killed; `waits`: what it waits for."""

    pid: int
    identity: str
    host: str = ""
    boot_id: str = ""
    started_at: float | None = None
    is_gone: bool = False
    waits: str = ""


@dataclass(frozen=True, kw_only=True)
class LocalBackend(Backend):
    """The jobs of one directory of runs, on this machine."""

    runs_dir: RunsDir

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Start a controller under a new job id, and wait until it is detached.

        A failure leaves neither.
        """
        split_gpus(plan, os.environ.get(VISIBLE))
        try:
            job_id = take_job_id(self.runs_dir, paths)
            try:
                return _start_controller(plan, paths, job_id)
            except BaseException:
                _stop_controller(paths)
                self.runs_dir.job_link(job_id).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _not_started(str(error)) from error

    def submit_again(self, plan: Plan, record: JobRecord, **_: object) -> Submission:
        """Start another controller for a run, under a new id; there is no queue."""
        return self.submit(plan, record.paths)

    def query(self, job_ids: Sequence[str], **_: object) -> dict[str, SchedulerJob]:
        """Read the state of jobs from their files and their controllers' processes, as of now."""
        found = {job_id: self._paths(job_id) for job_id in job_ids}
        return {job_id: self._job(job_id, paths) for job_id, paths in found.items() if paths}

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Ask the controllers to end their jobs; they take at most their grace time."""
        for job_id in job_ids:
            self.signal(job_id, signal.SIGTERM, f"clusterrun cancel {job_id}")

    def signal(self, job_id: str, number: int, command: str = "") -> None:
        """Signal the controller of a job that has not ended; `command` is for the hint."""
        paths = self._paths(job_id)
        if paths is None:
            raise JobNotFoundError(f"no job {job_id} in {self.runs_dir.root}")
        controller = read_controller(paths)
        if controller is None or read_end(paths) is not None:
            return
        if self._is_elsewhere(controller):
            raise ClusterrunError(
                f"job {job_id} runs on {controller.host}, not on this machine",
                hint=f"run '{command}' there",
            )
        process.send_signal(controller.pid, controller.identity, number)

    def _job(self, job_id: str, paths: RunPaths) -> SchedulerJob:
        controller = read_controller(paths)
        state, reason = self._state_of(paths, controller)
        with files.noting_damage() as damaged:
            end = read_end(paths)  # after the process was checked, which writes it last
        if damaged and state is JobState.FAILED:
            state, reason = JobState.UNKNOWN, "its end.json is damaged"
        started = controller.started_at if controller else None
        if end is not None:
            state, reason = end.state, ""
        until = time.time() if state is JobState.RUNNING else end and end.ended_at
        return SchedulerJob(
            job_id=job_id,
            source="files",
            asked_at=time.time(),
            state=state,
            reason=reason,
            start=started,
            end=end.ended_at if end else None,
            exit_code=end.exit_code if end else None,
            elapsed_s=int(until - started) if started and until else None,
        )

    def _state_of(self, paths: RunPaths, controller: Controlling | None) -> tuple[JobState, str]:
        """Return the state of a job that has no end.json, and why."""
        if controller is None and paths.controller.exists():
            return JobState.UNKNOWN, "its controller.json is damaged"
        if controller is None:
            with contextlib.suppress(OSError):
                if time.time() - paths.root.stat().st_mtime < START_S:
                    return JobState.PENDING, "its controller is starting"
            return JobState.FAILED, "its controller never started"
        if self._is_elsewhere(controller):
            return self._state_elsewhere(paths, controller)
        if process.identity(controller.pid) == controller.identity:
            return JobState.RUNNING, controller.waits
        return JobState.FAILED, "its controller is gone: it was killed, or the machine went down"

    def _is_elsewhere(self, controller: Controlling) -> bool:
        """Return whether a controller runs on another machine, whose processes can't be seen."""
        same_boot = controller.boot_id == process.boot_id()
        return not same_boot and controller.host != socket.gethostname()

    def _state_elsewhere(self, paths: RunPaths, controller: Controlling) -> tuple[JobState, str]:
        del paths
        return JobState.UNKNOWN, f"it runs on {controller.host} and can't be checked from here"

    def _paths(self, job_id: str) -> RunPaths | None:
        try:
            link = self.runs_dir.job_link(JobId(job_id))
            return RunPaths(root=link.resolve(strict=True))
        except (OSError, RuntimeError, ValueError):
            return None


def backend(where: Where) -> LocalBackend:
    """Return the backend of this package."""
    return LocalBackend(runs_dir=where.runs_dir)


def split_gpus(plan: Plan, visible: str | None) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each node; [] for a job without GPUs.

    `visible` is the submitting shell's value, for a plan that names no GPUs. Raises
    ClusterrunError if there are too few.
    """
    if plan.device is not Device.CUDA:
        return []
    each = plan.gpus_per_node or plan.procs_per_node
    needed = plan.nodes * each
    ids = list(plan.gpu_ids) or (visible.split(",") if visible else None)
    if ids is None:
        ids = [str(number) for number in range(needed)]
    if len(ids) < needed:
        raise ClusterrunError(
            f"{plan.nodes} x {each} GPUs are needed ({needed}), but only {len(ids)} can be used",
            cause=f"GPUs {','.join(ids)}",
            hint="name more with --gpu-ids, or use fewer nodes",
        )
    return [",".join(ids[rank * each : (rank + 1) * each]) for rank in range(plan.nodes)]


def _start_controller(plan: Plan, paths: RunPaths, job_id: JobId) -> Submission:
    keep = set(plan.pass_env)
    if plan.device is Device.CUDA and not plan.gpu_ids:
        keep.add(VISIBLE)  # the user chose these GPUs in the shell
    done = shell.run(
        [sys.executable, "-m", "clusterrun.backends.local.controller", str(paths.root), job_id],
        env=scrubbed(os.environ, keep=keep),
        cwd=paths.root,  # python -m looks for modules here first; the user's may have our names
        timeout_s=START_S,
        tries=1,
    )
    if done.rc != 0:
        raise _not_started(done.stderr.strip())
    return Submission(job_id=job_id)


def _stop_controller(paths: RunPaths) -> None:
    """End a controller whose submission failed or was interrupted."""
    controller = read_controller(paths)
    if controller is not None and process.send_signal(
        controller.pid, controller.identity, signal.SIGTERM
    ):
        deadline = time.monotonic() + STOP_S
        while read_end(paths) is None and time.monotonic() < deadline:
            time.sleep(0.05)


def _not_started(cause: str) -> SubmissionError:
    return SubmissionError("cannot start the job on this machine", cause=cause)


def read_controller(paths: RunPaths) -> Controlling | None:
    """Read controller.json; None if it is missing or damaged."""
    found = reading.read(paths.controller, Controlling, SCHEMA)
    if found and not 0 < found.pid < MOST_PIDS:
        files.note_damage(paths.controller)
        return None
    return found
