"""Find the job that a name means: a run of clusterrun, a job of another tool, or a log file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterrun.backends.slurm import foreign
from clusterrun.backends.slurm.foreign import ForeignPart
from clusterrun.cli.logs.job import LogJob, PlainLogs, RunLogs
from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import announce, find_announced
from clusterrun.errors import JobNotFoundError, SchedulerUnreachableError, UsageError
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell
from clusterrun.verbs.find import FORWARDED, find_record, places_of_runs, refuse_elsewhere


@dataclass(frozen=True, kw_only=True)
class Named:
    """The job that a name means; a stamped log also names its node and attempt."""

    job: LogJob
    nodes: frozenset[str] | None = None
    attempt: int | None = None


def find_log_job(name: str | None) -> Named:
    """Find the job that a name means.

    Raises JobNotFoundError, and SchedulerUnreachableError if only Slurm could find it.
    """
    if name is None or name in FORWARDED:
        return Named(job=RunLogs(record=find_announced(name)))
    if _is_file(name):
        return _find_by_path(Path(os.path.abspath(name)))
    try:
        return _find_run(name)
    except JobNotFoundError as error:
        if not foreign.is_job_id(name) or shell.find("scontrol") is None:
            raise
        parts = foreign.ask(name)
        if not parts:
            hint = "pass its log file; Slurm forgets a job a few minutes after it ends"
            raise JobNotFoundError(error.message, hint=(*error.hints, hint)) from None
        return _named_by_slurm(name, parts)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or in a directory that may not be read
        return False


def _find_by_path(path: Path) -> Named:
    """Take a file for a stamped log of a run, or for plain text."""
    paths, attempt = RunPaths(root=path.parent.parent.parent), path.parent.name[1:]
    is_stamped = attempt.isdecimal() and paths.log(int(attempt), path.stem) == path
    if not (is_stamped and paths.record.is_file()):
        return Named(job=PlainLogs(path=path))
    run = RunLogs(record=find_record(str(paths.root)))
    return Named(job=run, nodes=frozenset({path.stem}), attempt=int(attempt))


def _find_run(name: str) -> Named:
    """Find a run; if it is of another project, its id may also name another job of this Slurm."""
    places = places_of_runs()
    try:
        record = records.resolve_job(name, places)
    except UsageError:  # the id of several runs elsewhere
        parts = _ask_for_own_job(name)
        if not parts:
            raise
        return _named_by_slurm(name, parts)
    is_here = _is_same(record.runs_dir.root, places[0].root)
    if name not in record.job_ids or is_here or record.home:
        announce(name, record)
        refuse_elsewhere([(name, record)])
        return Named(job=RunLogs(record=record))
    parts = _ask_for_own_job(name)
    if parts and not _is_same(_run_of(parts[0]).root, record.paths.root):
        return _named_by_slurm(name, parts)
    output.say(f"using job {name} of {record.run_dir}")
    return Named(job=RunLogs(record=record))


def _ask_for_own_job(name: str) -> list[ForeignPart]:
    """Ask Slurm for a job of this user; none if Slurm does not answer."""
    try:
        parts = foreign.ask(name) if foreign.is_job_id(name) else []
    except SchedulerUnreachableError:
        return []
    return parts if any(part.user == records.current_user() for part in parts) else []


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _run_of(part: ForeignPart) -> RunPaths:
    """Return the run whose batch script a part would be, judging only by its output."""
    return RunPaths(root=Path(part.stdout).parent.parent)


def _named_by_slurm(job_id: str, parts: Sequence[ForeignPart]) -> Named:
    run = _run_of(parts[0])
    if run.batch_output == Path(parts[0].stdout) and run.record.is_file():
        return Named(job=RunLogs(record=find_record(str(run.root))))
    output.note(f"job {job_id} was not started by clusterrun; its lines have no times")
    for part in parts:
        if "%" in part.stdout:
            output.note(f"cannot expand the % in {part.stdout}; only the node knows its value")
    return Named(job=PlainLogs(job_id=job_id, parts=list(parts)))
