"""The job whose logs are read: a run of clusterrun, a job of another tool, or a log file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clusterrun.backends.slurm import foreign
from clusterrun.backends.slurm.foreign import ForeignPart
from clusterrun.backends.slurm.reasons import explain
from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import find_announced
from clusterrun.errors import ClusterrunError, JobNotFoundError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.files import Catalogue, FileKind, LogFile, find_files, plain_files
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from clusterrun.verbs.find import FORWARDED, find_record
from clusterrun.verbs.status import POLL_MOST_S, POLL_S, look

BATCH = "batch"
WAITING = (JobState.PENDING, JobState.CONFIGURING)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The state of a job; `waits_for`: why it has not started; `error`: why that is unknown.

    `job` is all that is known of a run.
    """

    state: JobState
    waits_for: str = ""
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
    pauses_s: ClassVar = (POLL_S, POLL_MOST_S)  # between two looks

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
        paths = self.record.paths
        if batch:
            script = LogFile(node=BATCH, path=paths.batch_output, kind=FileKind.PLAIN)
            return plain_files(lambda: [script])
        return Catalogue(paths.attempts, lambda attempt: find_files(paths, attempt, nodes))

    def file_of(self, attempt: int, node: str) -> str:
        """Return the file of a node within the run directory."""
        paths = self.record.paths
        return str(paths.log(attempt, node).relative_to(paths.root))

    def standing(self, *, fresh: bool = False) -> Standing:
        """Ask the files first, then the scheduler for the rest."""
        now = look(self.record, max_age_s=0 if fresh else None)
        return Standing(
            state=now.state,
            waits_for=now.pending.text if now.pending else now.reason,
            elapsed_s=now.elapsed_s,
            exit_code=now.exit_code,
            job=now,
            error=now.error,
        )


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
    pauses_s: ClassVar = (10.0, 10.0)  # each look asks slurmctld

    @property
    def title(self) -> str:
        """Its job id, or its file."""
        return f"job {self.job_id}" if self.job_id else self.name

    @property
    def name(self) -> str:
        """Its job id, or its file."""
        return self.job_id or str(self.path)

    def catalogue(self, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
        """Return its output, always that of the batch script."""
        return plain_files(self._files)

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


LogJob = RunLogs | PlainLogs


def files_of_parts(parts: Iterable[ForeignPart]) -> list[LogFile]:
    """List the files that Slurm writes a job's output to, without duplicates.

    A job that has not started has none: a file with its name belongs to an earlier job.
    """
    files: dict[str, LogFile] = {}
    for part in parts:
        if part.job.state in (JobState.PENDING, JobState.CONFIGURING) and not part.job.restarts:
            continue
        for name, node, stream in (
            (part.stdout, part.label, Stream.OUT),
            (part.stderr, f"{part.label}.err", Stream.ERR),
        ):
            if name:
                file = LogFile(node=node, path=Path(name), kind=FileKind.PLAIN, stream=stream)
                files.setdefault(name, file)
    return list(files.values())


# A job, and the nodes and the attempt that its name names: those of a stamped log.
Named = tuple[LogJob, frozenset[str] | None, int | None]


def find_log_job(name: str | None) -> Named:
    """Find the job that a name means.

    Raises JobNotFoundError, and SchedulerUnreachableError if only Slurm could find it.
    """
    if name is None or name in FORWARDED:
        return RunLogs(record=find_announced(name)), None, None
    with contextlib.suppress(OSError, ValueError):  # too long for a name, or not to be looked at
        if Path(name).is_file():
            return _find_by_path(Path(os.path.abspath(name)))
    try:
        return RunLogs(record=find_announced(name)), None, None
    except JobNotFoundError as error:
        if not foreign.is_job_id(name) or shell.find("scontrol") is None:
            raise
        parts = foreign.ask(name)
        if not parts:
            hint = "pass its log file; Slurm forgets a job a few minutes after it ends"
            raise JobNotFoundError(error.message, hint=(*error.hints, hint)) from None
        return _named_by_slurm(name, parts)


def _find_by_path(path: Path) -> Named:
    """Take a file for a stamped log of a run, or for plain text."""
    paths, attempt = RunPaths(root=path.parent.parent.parent), path.parent.name[1:]
    is_stamped = attempt.isdecimal() and paths.log(int(attempt), path.stem) == path
    if not (is_stamped and paths.record.is_file()):
        return PlainLogs(path=path), None, None
    run = RunLogs(record=find_record(str(paths.root)))
    return run, frozenset({path.stem}), int(attempt)


def _named_by_slurm(job_id: str, parts: Sequence[ForeignPart]) -> Named:
    run = RunPaths(root=Path(parts[0].stdout).parent.parent)  # if its output is a batch script's
    if run.batch_output == Path(parts[0].stdout) and run.record.is_file():
        return RunLogs(record=find_record(str(run.root))), None, None
    output.note(f"job {job_id} was not started by clusterrun; its lines have no times")
    for part in parts:
        if "%" in part.stdout:
            output.note(f"cannot expand the % in {part.stdout}; only the node knows its value")
    return PlainLogs(job_id=job_id, parts=list(parts)), None, None
