"""The job whose logs are read: a run of clusterrun, or plain files of another tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from clusterrun.backends.slurm import foreign
from clusterrun.backends.slurm.foreign import ForeignPart
from clusterrun.backends.slurm.reasons import explain
from clusterrun.backends.status import JobStatus
from clusterrun.errors import ClusterrunError
from clusterrun.logs.catalogue import BATCH, Catalogue, PlainFiles, RunFiles, files_of_parts
from clusterrun.logs.files import FileKind, LogFile, stat_file
from clusterrun.rundir import record as records
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobState
from clusterrun.verbs.release import Release
from clusterrun.verbs.status import status

WAITING = (JobState.PENDING, JobState.CONFIGURING)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The state of a job; `waits_for`: why it has not started; `error`: why that is unknown.

    `is_held`: it was requeued, and Slurm holds it. `job` is all that is known of a run.
    """

    state: JobState
    waits_for: str = ""
    is_held: bool = False
    elapsed_s: int | None = None
    exit_code: int | None = None
    job: JobStatus | None = None
    error: ClusterrunError | None = None


def waiting(job: LogJob, standing: Standing) -> str:
    """Describe in a sentence why a job waits."""
    state = f"{job.title} is {standing.state.value.lower()}"
    return f"{state}: {standing.waits_for}" if standing.waits_for else state


@dataclass(frozen=True, kw_only=True)
class RunLogs:
    """The logs of a run of clusterrun."""

    record: JobRecord
    held: Release = field(default_factory=Release, repr=False, compare=False)

    @property
    def title(self) -> str:
        """Its newest job, or its run if it has no job yet."""
        record = records.read_again(self.record)
        return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"

    @property
    def name(self) -> str:
        """Its job id, or the name of its directory."""
        return self.record.job_id or self.record.run_id

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return self.record.world_size

    @property
    def procs_per_node(self) -> int:
        """The number of ranks of a node."""
        return self.record.procs_per_node

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
        """Return its logs, or those of some nodes; or the batch script's own output."""
        if not batch:
            return RunFiles(paths=self.record.paths, nodes=nodes)
        output = LogFile(node=BATCH, path=self.record.paths.batch_output, kind=FileKind.PLAIN)
        return PlainFiles(candidates=lambda: [output])

    def file_of(self, attempt: int, node: str) -> str:
        """Return the file of a node within the run directory."""
        paths = self.record.paths
        return str(paths.log(attempt, node).relative_to(paths.root))

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask the files first, then the scheduler for the rest."""
        now = status(self.record, max_age_s=0 if fresh else None)
        return Standing(
            state=now.state,
            waits_for=now.pending.text if now.pending else now.reason,
            is_held=now.is_held,
            elapsed_s=now.elapsed_s,
            exit_code=now.exit_code,
            job=now,
            error=now.error,
        )

    def release(self) -> bool:
        """Have Slurm start a requeued job immediately; ask only once per requeue."""
        return self.held(status(self.record))

    def end_mark(self) -> int | None:
        """Return the time of end.json, None if there is none."""
        end = stat_file(self.record.paths.end)
        return end.st_mtime_ns if end else None


@dataclass(kw_only=True)
class PlainLogs:
    """Output without times or ranks: a job of another tool, or a file.

    `parts`: the last answer of slurmctld.
    """

    job_id: str = ""
    parts: list[ForeignPart] = field(default_factory=list)
    path: Path | None = None
    record: None = None
    world_size: int = 1
    procs_per_node: int = 1

    @property
    def title(self) -> str:
        """Its job id, or its file."""
        return f"job {self.job_id}" if self.job_id else self.name

    @property
    def name(self) -> str:
        """Its job id, or its file."""
        return self.job_id or str(self.path)

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> PlainFiles:
        """Return its output, always that of the batch script."""
        return PlainFiles(candidates=self._files)

    def _files(self) -> list[LogFile]:
        if self.path is not None:
            return [LogFile(node=self.path.name, path=self.path, kind=FileKind.PLAIN)]
        return files_of_parts(self.parts)

    def file_of(self, attempt: int, node: str) -> str:
        """Return the file of a node."""
        return next((str(file.path) for file in self._files() if file.node == node), node)

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask slurmctld; a file without a job is treated as ended."""
        if not self.job_id:
            return Standing(state=JobState.COMPLETED)
        try:
            self.parts = foreign.ask(self.job_id) or self.parts
        except ClusterrunError as error:
            return Standing(state=JobState.UNKNOWN, error=error)
        state = foreign.joint_state([part.job.state for part in self.parts])
        job = next(part.job for part in self.parts if part.job.state is state)
        return Standing(
            state=state,
            waits_for=explain(job.reason, self.job_id).text if state in WAITING else "",
            elapsed_s=job.elapsed_s,
            exit_code=job.exit_code,
        )

    def release(self) -> bool:
        """Do nothing: another program submitted this job."""
        return False

    def end_mark(self) -> int | None:
        """Return None: this job writes no end.json."""
        return None


LogJob = RunLogs | PlainLogs
