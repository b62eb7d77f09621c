"""Find the run that a name refers to."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from clusterrun.backends.environment import working_directory
from clusterrun.errors import ClusterrunError, ElsewhereError, JobNotFoundError, UsageError
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import JobRecord, adopted, remembered_roots
from clusterrun.shared import files

if TYPE_CHECKING:
    from clusterrun.config.settings import Resolved
    from clusterrun.verbs.job import Job

Which: TypeAlias = "str | JobRecord | Job"  # a job: its id, name or path, record, or handle

_PATHS: Final = ("/", "./", "../")
# Run directories by the words for them, if another machine forwarded this command line.
FORWARDED: Final[dict[str, str]] = {}


def find_record(job: Which | None = None) -> JobRecord:
    """Find a run by job id, name, run id or a path in it; None is this project's newest.

    Raises JobNotFoundError, and ElsewhereError if its run directory is on another host.
    """
    record = locate(job)
    refuse_elsewhere([(job if isinstance(job, str) else "", record)])
    return record


def refuse_elsewhere(found: Sequence[tuple[str, JobRecord]]) -> None:
    """Raise ElsewhereError if runs, each with the word that names it, are on another host.

    Raises UsageError if they are on several, NotAdoptedError if only job.json names the host.
    """
    found = [(word, adopted(record)) for word, record in found]  # with the homes this user accepted
    hosts = {record.home.host if record.home else "" for _, record in found}  # "": this machine
    if len(hosts) > 1:
        places = ", ".join(name or "this machine" for name in sorted(hosts))
        text = f"the run directories are on several hosts: {places}"
        raise UsageError(text, hint="name the jobs of one host at a time")
    home = found[-1][1].home if found else None  # all are on one host
    if home is not None:
        runs = {word: record.home.run_dir for word, record in found if record.home}
        raise ElsewhereError(home.host, home.python, runs, found[0][1].job_id)


def locate(job: Which | None) -> JobRecord:
    """Find a run as `find_record` does, on any host; a forwarded command brings its directory."""
    if job is not None and not isinstance(job, str):
        return job if isinstance(job, JobRecord) else job.record
    if (run_dir := FORWARDED.get(job or "")) is not None:  # "": no word was typed
        paths = RunPaths(root=Path(run_dir))
        if not paths.record.exists():
            text = f"the run directory {paths.root} is gone from {socket.gethostname()}"
            raise JobNotFoundError(text, hint="choose another run; clusterrun list shows them")
        return records.read(paths)
    if job and job.startswith(_PATHS):  # no list of the directories of runs is needed
        with contextlib.suppress(JobNotFoundError):
            return records.resolve_job(job, ())
    return records.resolve_job(job, places_of_runs())


def is_of_other_project(record: JobRecord) -> bool:
    """Return whether a run belongs to another project; False for a forwarded command."""
    return not FORWARDED and record.paths.runs_dir.root.resolve() != own_runs().root.resolve()


def places_of_runs() -> list[RunsDir]:
    """List the directories of runs: this project's, then all that were used before."""
    own = own_runs()
    real = own.root.resolve()
    return [own, *(p for p in remembered_roots() if p.root.resolve() != real)]


def own_runs() -> RunsDir:
    """Return this project's directory of runs."""
    from clusterrun.config.load import load_run_dir  # not for a run that is given by its path
    from clusterrun.config.spec import JobSpec

    cwd = working_directory(os.environ)
    try:
        run_dir = load_run_dir(environ=os.environ, cwd=cwd)
    except UsageError:  # a job must be found even while its configuration is being edited
        run_dir = JobSpec().run_dir
    return RunsDir(root=Path(os.path.normpath(cwd / run_dir)))


def configuration(
    record: JobRecord, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Resolved:
    """Read the configuration of a run. Raises ClusterrunError if the file is gone."""
    from clusterrun.config.load import load_again  # not for what reads only records

    path, copy = record.paths.resolved, record.paths.project  # submit may copy a project to hosts
    try:
        text = files.read_whole(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        hint = "start a new run: clusterrun submit"
        raise ClusterrunError(f"cannot read {path}", cause=str(error), hint=hint) from error
    return load_again(
        text,
        flags or {},
        shown=str(path),
        environ=os.environ,
        cwd=copy if copy.is_dir() else Path(record.workdir),
        typed_in=working_directory(os.environ),
        overrides=overrides,
    )
