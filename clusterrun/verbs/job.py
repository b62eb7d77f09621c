"""The Python handle of a job, submitit's Job on top of our verbs, and its log lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from submitit.core import core
from submitit.core.utils import FailedJobError

from clusterrun.backends.status import JobStatus
from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobState
from clusterrun.verbs.cancel import cancel
from clusterrun.verbs.find import Which, find_record
from clusterrun.verbs.logs import read_logs
from clusterrun.verbs.status import status, wait

_STREAMS = {"stdout": Stream.OUT, "stderr": Stream.ERR}


class Watcher(core.InfoWatcher):  # type: ignore[misc]  # submitit is not followed
    """Answers submitit's queries about one job: from the run's files, then the scheduler."""

    def __init__(self, record: JobRecord) -> None:
        super().__init__()
        self._record = record

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state's name; `force` skips remembered answers."""
        del job_id
        return status(self._record, max_age_s=0 if mode == "force" else None).state.value

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return the fields that submitit shows for a job."""
        return {"JobID": job_id, "State": self.get_state(job_id, mode)}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether the job has ended."""
        return JobState(self.get_state(job_id, mode)).is_terminal


class Job(core.Job):  # type: ignore[misc]  # submitit is not followed
    """A submitted job, whose status you can query, and which you can wait for and end.

    It is also a submitit Job: it has `state`, `done()`, `result()`, `exception()`, `stdout()` and
    `awaitable()`, and submitit's helpers (`as_completed`, `monitor_jobs`) accept it.
    `record` is the content of job.json when the handle was made.
    """

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.watcher = Watcher(record)
        super().__init__(folder=record.paths.slurm_dir, job_id=record.job_id)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.record.paths.root

    def status(self) -> JobStatus:
        """Return the status of the job."""
        return status(self.record)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended and return its last status; like `clusterrun.wait`."""
        return wait(self.record, timeout_s=timeout_s)

    def logs(
        self,
        *,
        ranks: Collection[int] | None = None,
        nodes: Collection[str] | None = None,
        tail: int | None = None,
        attempt: int | None = None,
        errors: bool = False,
    ) -> Iterator[LogLine]:
        """Yield the log lines of the run; like `clusterrun.read_logs`."""
        return read_logs(
            self.record, ranks=ranks, nodes=nodes, tail=tail, attempt=attempt, errors=errors
        )

    def cancel(self, check: bool = True) -> None:
        """End the job; `check` is submitit's and has no effect: the job is always checked."""
        del check
        cancel(self.record)

    def exception(self) -> FailedJobError | None:
        """Wait for the end and return why the job failed; None if it completed."""
        ended = self.wait()
        if ended.state.is_success:
            return None
        job_id = ended.record.job_id
        known = {JobState.CANCELLED: "the job was cancelled", JobState.TIMEOUT: "the time limit"}
        why = known.get(ended.state) or ended.reason or "no reason is known"
        if ended.failure:
            why = ended.failure.message or ended.failure.reason
        error = FailedJobError(f"job {job_id} is {ended.state.value}: {why}")
        error.hint = f"read its logs: clusterrun logs {job_id}"
        return error

    def results(self) -> list[JobStatus]:
        """Wait for the end and return the last status. Raises FailedJobError."""
        error = self.exception()
        if error is not None:
            raise error
        return [self.status()]

    def _get_logs_string(self, name: str) -> str | None:
        lines = [line.text for line in self.logs() if line.stream is _STREAMS[name]]
        return b"".join(line + b"\n" for line in lines).decode(errors="replace")


def find_job(job: Which | None = None) -> Job:
    """Find a run by job id, name, run id or a path in it; None is the newest of this project.

    Raises JobNotFoundError.
    """
    return Job(find_record(job))
