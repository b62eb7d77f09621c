"""The job whose logs are read: a run of ours, or a foreign job that is adopted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from clusterrun import record as records
from clusterrun.errors import ClusterrunError
from clusterrun.logs.catalogue import Catalogue, RunFiles
from clusterrun.logs.files import Kind, LogFile, stat_file
from clusterrun.release import Release, is_held
from clusterrun.state import JobState

if TYPE_CHECKING:
    from clusterrun.logs.foreign import ForeignJob
    from clusterrun.record import JobRecord

WAITING = (JobState.PENDING, JobState.CONFIGURING)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a job stands; `waits_for` is why it has not started, `error` why nobody could say.

    `is_held`: it was requeued, and Slurm holds it back.
    """

    state: JobState
    waits_for: str = ""
    is_held: bool = False
    elapsed_s: int | None = None
    exit_code: int | None = None
    error: ClusterrunError | None = None


def waiting(job: LogJob, standing: Standing) -> str:
    """Say what a job that has not started waits for."""
    state = f"{job.title} is {standing.state.value.lower()}"
    return f"{state}: {standing.waits_for}" if standing.waits_for else state


class LogJob(Protocol):
    """What reading, following and printing must know of a job."""

    @property
    def title(self) -> str:
        """Name the job in a sentence."""

    @property
    def name(self) -> str:
        """Name it as a command line does."""

    @property
    def world_size(self) -> int:
        """Count its ranks."""

    @property
    def procs_per_node(self) -> int:
        """Count the ranks of a node."""

    @property
    def record(self) -> JobRecord | None:
        """What was remembered of a run of ours; None for a foreign job."""

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
        """Say where its logs are, or those of some nodes; or the batch script's own output."""

    def file_of(self, attempt: int, node: str) -> str:
        """Name the file of a node's lines."""

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask how it stands; `fresh`: no remembered answer."""

    def release(self) -> bool:
        """Have Slurm start it now, where it was requeued and is held back; say whether it was."""

    def end_mark(self) -> int | None:
        """Give a number that changes when its files say that it has ended."""


@dataclass(frozen=True, kw_only=True)
class RunLogs:
    """The logs of a run of ours."""

    record: JobRecord
    held: Release = field(default_factory=Release, repr=False, compare=False)

    @property
    def title(self) -> str:
        """Name it by its job, which may be another by now, or by its run where it has none."""
        record = records.read_again(self.record)
        return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"

    @property
    def name(self) -> str:
        """Name it by its id, or its directory's name."""
        return self.record.job_id or self.record.run_id

    @property
    def world_size(self) -> int:
        """Count its ranks."""
        return self.record.world_size

    @property
    def procs_per_node(self) -> int:
        """Count the ranks of a node."""
        return self.record.procs_per_node

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
        """Say where its logs are."""
        return RunFiles(paths=self.record.paths, nodes=nodes, is_batch=batch)

    def file_of(self, attempt: int, node: str) -> str:
        """Name the file within the run directory."""
        paths = self.record.paths
        return str(paths.log(attempt, node).relative_to(paths.root))

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask the files first, and the scheduler for what they can't know."""
        from clusterrun import api

        status = api.status(self.record, max_age_s=0) if fresh else api.status(self.record)
        return Standing(
            state=status.state,
            waits_for=status.pending.text if status.pending else status.reason,
            is_held=is_held(status),
            elapsed_s=status.elapsed_s,
            exit_code=status.exit_code,
            error=status.error,
        )

    def release(self) -> bool:
        """Ask once for each time that it was requeued."""
        from clusterrun import api

        return self.held(api.status(self.record))

    def end_mark(self) -> int | None:
        """Give the time of end.json."""
        end = stat_file(self.record.paths.end)
        return end.st_mtime_ns if end else None


@dataclass(frozen=True, kw_only=True)
class ForeignLogs:
    """The output of a job that clusterrun did not start: plain files, without times or streams."""

    job: ForeignJob
    record: JobRecord | None = None

    @property
    def title(self) -> str:
        """Name it by its id, or by its file."""
        return f"job {self.job.job_id}" if self.job.job_id else str(self.job.files[0].path)

    @property
    def name(self) -> str:
        """Name it by its id, or by its file."""
        return self.job.job_id or str(self.job.files[0].path)

    @property
    def world_size(self) -> int:
        """Count the tasks that have files of their own, as far as their numbers go."""
        ranks = [file.rank for file in self.job.files if file.rank is not None]
        return max(ranks, default=0) + 1

    @property
    def procs_per_node(self) -> int:
        """Take all for one node: which task was where, no file says."""
        return self.world_size

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
        """Say where its files are."""
        return ForeignFiles(job=self.job)

    def file_of(self, attempt: int, node: str) -> str:
        """Name the file."""
        files = ForeignFiles(job=self.job).files(attempt)
        return next((str(file.path) for file in files if file.node == node), node)

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask Slurm; a file alone has no standing and counts as ended."""
        from clusterrun.logs.foreign import ask_state

        if not self.job.job_id:
            return Standing(state=JobState.COMPLETED)
        try:
            state = ask_state(self.job, max_age_s=0) if fresh else ask_state(self.job)
        except ClusterrunError as error:
            return Standing(state=JobState.UNKNOWN, error=error)
        return Standing(state=state)

    def release(self) -> bool:
        """Leave a job of another program alone."""
        return False

    def end_mark(self) -> int | None:
        """Know nothing: its files do not say."""
        return None


@dataclass(frozen=True, kw_only=True)
class ForeignFiles:
    """The files of a foreign job; all are one attempt."""

    job: ForeignJob

    def newest_attempt(self) -> int:
        """Count one."""
        return 1

    def files(self, attempt: int) -> list[LogFile]:
        """List what is there now, each file by a name of its own."""
        from clusterrun.logs.foreign import look_again, name_files

        found = look_again(self.job).files
        return [
            LogFile(
                node=name,
                path=file.path,
                kind=Kind.PLAIN,
                ranks=None if file.rank is None else range(file.rank, file.rank + 1),
                stream=file.stream,
            )
            for name, file in zip(name_files(found), found, strict=True)
        ]
