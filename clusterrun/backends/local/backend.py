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
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.backends.base import Backend, SchedulerJob, Submission, Where
from clusterrun.backends.environment import scrubbed
from clusterrun.errors import ClusterrunError, JobNotFoundError, SubmissionError
from clusterrun.launch.plan import Plan
from clusterrun.node.base.processes import stat_fields
from clusterrun.rundir import reading
from clusterrun.rundir.end import read_end
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import link_target, state_dir
from clusterrun.shared import files, shell
from clusterrun.shared.files import write_whole
from clusterrun.shared.locks import locked
from clusterrun.shared.state import JobId, JobState

if TYPE_CHECKING:
    from clusterrun.rundir.record import JobRecord

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCHEMA = "clusterrun.controller/1"
START_S = 60.0
STOP_S = 15.0
MOST_PIDS = 1 << 22  # of Linux
AHEAD = 1_000_000  # of the last number here: others can't use up the numbers of jobs


@dataclass(frozen=True, kw_only=True)
class Controlling:
    """The process that controls a job; `is_gone`: it was killed; `waits`: what it waits for."""

    pid: int
    identity: str
    host: str = ""
    started_at: float | None = None
    is_gone: bool = False
    waits: str = ""

    def signal(self, number: int) -> bool:
        """Signal the process if it is alive; return whether it was."""
        with contextlib.suppress(ProcessLookupError):
            if identity(self.pid) == self.identity:  # its pid alone may have been reused
                os.kill(self.pid, number)
                return True
        return False


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    return files.last_line(Path("/proc/sys/kernel/random/boot_id"))


def identity(pid: int) -> str | None:
    """Return an id of a process that no later one gets; None if it is gone or a zombie."""
    fields = stat_fields(pid)  # the 20th is its start, in ticks since boot
    return f"{boot_id()}:{fields[19]}" if fields and fields[0] not in ("Z", "X") else None


@dataclass(frozen=True, kw_only=True)
class LocalBackend(Backend):
    """The jobs of one directory of runs, on this machine."""

    runs_dir: RunsDir

    def submit(self, plan: Plan, paths: RunPaths) -> Submission:
        """Start a detached controller under a new job id; a failure leaves neither."""
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
        """Ask the controllers to end their jobs, within the grace time."""
        for job_id in job_ids:
            self.signal(job_id, signal.SIGTERM)

    def signal(self, job_id: str, number: int) -> None:
        """Signal the controller of a job that has not ended."""
        paths = self._paths(job_id)
        if paths is None:
            raise JobNotFoundError(f"no job {job_id} in {self.runs_dir.root}")
        controller = read_controller(paths)
        if controller is None or read_end(paths) is not None:
            return
        if self._is_elsewhere(controller):
            self._signal_elsewhere(job_id, paths, controller, number)
        else:
            controller.signal(number)

    def _signal_elsewhere(
        self, job_id: str, paths: RunPaths, controller: Controlling, number: int
    ) -> None:
        """Raise ClusterrunError: this backend can't signal a process of another machine."""
        del paths, number
        text = f"job {job_id} runs on {controller.host}, not on this machine"
        raise ClusterrunError(text, hint=f"run 'clusterrun cancel {job_id}' there")

    def _job(self, job_id: str, paths: RunPaths) -> SchedulerJob:
        """Return what the files say of a job; without end.json, its controller decides."""
        controller = read_controller(paths)
        state, reason = self._state_of(paths, controller)
        with files.noting_damage() as damaged:
            end = read_end(paths)  # only now: the process writes it just before it exits
        if damaged and state is JobState.FAILED:
            state, reason = JobState.UNKNOWN, "its end.json is damaged"
        started = controller.started_at if controller else None
        ended = end.ended_at if end else None
        if end is not None:
            state, reason = end.state, ""
        until = time.time() if state is JobState.RUNNING else ended
        return SchedulerJob(
            job_id=job_id,
            source="files",
            asked_at=time.time(),
            state=state,
            reason=reason,
            start=started,
            end=ended,
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
        if identity(controller.pid) == controller.identity:
            return JobState.RUNNING, controller.waits
        return JobState.FAILED, "its controller is gone: it was killed, or the machine went down"

    def _is_elsewhere(self, controller: Controlling) -> bool:
        """Return whether a controller runs on another machine, whose processes can't be seen."""
        return not controller.is_gone and controller.host != socket.gethostname()

    def _state_elsewhere(self, paths: RunPaths, controller: Controlling) -> tuple[JobState, str]:
        del paths
        return JobState.UNKNOWN, f"it runs on {controller.host} and can't be checked from here"

    def _paths(self, job_id: str) -> RunPaths | None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            return RunPaths(root=self.runs_dir.job_link(JobId(job_id)).resolve(strict=True))
        return None


def backend(where: Where) -> LocalBackend:
    """Return the backend of this package."""
    return LocalBackend(runs_dir=where.runs_dir)


def _start_controller(plan: Plan, paths: RunPaths, job_id: JobId) -> Submission:
    """Start the controller's process, and return once it is detached. Raises SubmissionError."""
    done = shell.run(
        [sys.executable, "-m", "clusterrun.backends.local.controller", str(paths.root), job_id],
        env=scrubbed(os.environ, keep=plan.pass_env),
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
    if controller is not None and controller.signal(signal.SIGTERM):
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


# Ids of jobs without a queue: L1 on this machine, H2 on hosts, each number used once per user


def take_job_id(runs_dir: RunsDir, paths: RunPaths, *, prefix: str = "L", above: int = 0) -> JobId:
    """Take the next id by creating its link, which only one process can do.

    Its number is larger than `above` (unless that is absurd), the user's counter, and the numbers
    of the links here. The counter makes ids unique across projects; if it is lost or can't be
    written, ids are unique only within the project.
    """
    runs_dir.by_job.mkdir(mode=0o700, exist_ok=True)
    counter = _counter()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            counter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(counter.with_suffix(".lock")))
        number = _later_number(above, last_number(runs_dir)) + 1
        while True:
            job_id = JobId(f"{prefix}{number}")
            try:
                runs_dir.job_link(job_id).symlink_to(link_target(paths))
                break
            except FileExistsError:
                number += 1
        with contextlib.suppress(OSError):
            write_whole(counter, f"{job_id.number}\n")
    return job_id


def last_number(runs_dir: RunsDir) -> int:
    """Return the number of the newest id used here: the counter's, or a later link's."""
    counted = 0
    with contextlib.suppress(OSError, ValueError):
        counted = JobId(f"L{_counter().read_text(encoding='ascii').strip()}").number
    linked: list[JobId] = []
    with contextlib.suppress(OSError):
        linked = [JobId.read(entry.name) for entry in os.scandir(runs_dir.by_job)]
    numbers = (_later_number(job_id.number, counted) for job_id in linked if job_id.is_own)
    return max(numbers, default=counted)


def remember_number(number: int) -> None:
    """Raise the counter to `number`, so that ids taken here from now on are larger."""
    with contextlib.suppress(OSError, ValueError):
        counter = _counter()
        counter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(counter.with_suffix(".lock")):
            known = int(counter.read_text(encoding="ascii")) if counter.exists() else 0
            write_whole(counter, f"{_later_number(number, known)}\n")


def _later_number(number: int, last: int) -> int:
    """Return the larger of another party's number and the last one here; ignore an absurd one."""
    return number if last < number <= last + AHEAD else last


def _counter() -> Path:
    return state_dir() / "local-job-id"
