"""Ask the hosts that have the run directories for the status of their runs, all at once.

`python -m clusterrun.backends.hosts.homes` answers there, on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from clusterrun.backends import select
from clusterrun.backends.hosts.openssh import SSH_FAILED, module, nonsense, silent, ssh
from clusterrun.backends.local.backend import remember_number
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import ClusterrunError, NotAdoptedError
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord, adopted
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from clusterrun.shared.typed import decoded

ANSWER_S: Final = 10.0
ANSWER_BYTES: Final = 16 << 20
AT_ONCE: Final = 32
MOST_JOBS: Final = 1000  # of one run
MARK: Final = "clusterrun.homes/1 "  # a login script there may print lines of its own
# What a run's home may change in the record here.
_THEIRS: Final = ("job_id", "earlier_job_ids", "resumed_at", *records.SHAPE)


def ask(found: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of runs with a home elsewhere; UNKNOWN and `error` if it does not answer.

    Record here which jobs have continued them. A host that this user has not used for the run is
    not asked.
    """
    known: dict[str, JobStatus] = {}
    groups: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)  # by host and interpreter
    for record in found:
        try:
            own = adopted(record)
        except NotAdoptedError as error:
            known[record.run_dir] = _unknown(record, error, reason=error.message)
        else:
            assert own.home
            groups[own.home.host, own.home.python].append(own)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for of_host in pool.map(_statuses_from, groups, groups.values()):
            known |= {status.record.run_dir: status for status in of_host}
    return [known[record.run_dir] for record in found]


def _unknown(record: JobRecord, error: ClusterrunError | None = None, **why: Any) -> JobStatus:
    return JobStatus(record=record, state=JobState.UNKNOWN, error=error, **why)


def _statuses_from(place: tuple[str, str], group: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of runs of one host; if it does not answer, UNKNOWN for each."""
    host, python = place
    try:
        answers = _ask_host(host, python, [each.home.run_dir for each in group if each.home])
    except ClusterrunError as error:
        return [_unknown(record, error) for record in group]
    return [_with_answer(own, answer, host) for own, answer in zip(group, answers, strict=True)]


def _with_answer(record: JobRecord, answer: Any, host: str) -> JobStatus:
    """Return the status that a host answers; it may add jobs to the record here, but drop none."""
    if answer is None:
        return _unknown(record, notes=(f"its run directory is gone from {host}",))
    with contextlib.suppress(ValueError):
        there: JobStatus = decoded(JobStatus, answer)
        new = replace(record, **{name: getattr(there.record, name) for name in _THEIRS})
        is_grown = {*new.job_ids} >= {*record.job_ids} and 0 < len(new.job_ids) <= MOST_JOBS
        if is_grown and all(job_id.is_own for job_id in new.job_ids):
            if new.job_ids != record.job_ids:
                remember(new)
            return replace(there, record=new)
    return _unknown(record, nonsense(host))


def remember(record: JobRecord) -> None:
    """Record the jobs that continue a run: their ids name it, unless they name another run here."""
    remember_number(record.job_id.number)
    with contextlib.suppress(OSError, ClusterrunError):  # not writable: it keeps its other ids
        records.update(record.paths, lambda _: record)
        for job_id in record.job_ids:
            if not record.paths.runs_dir.job_link(job_id).exists():
                records.link_job(record.paths, job_id)


def _ask_host(host: str, python: str, run_dirs: Sequence[str]) -> list[Any]:
    """Return what a host answers for each run. Raises ClusterrunError."""
    argv = ssh(host, module(python, __name__))
    done = shell.run_once(argv, ANSWER_S, input=json.dumps(run_dirs), most=ANSWER_BYTES)
    if done.rc in (shell.TIMED_OUT, SSH_FAILED):
        raise silent(host, done.stderr or f"no answer within {ANSWER_S:.0f} s")
    try:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        found: list[Any] = decoded(list[Any], json.loads(line.removeprefix(MARK)))
        if len(found) != len(run_dirs):
            raise ValueError("an unexpected number of runs")
    except (ValueError, RecursionError) as error:
        raise ClusterrunError(
            f"clusterrun does not run on {host}, or has a different version",
            cause=(done.stderr.strip().splitlines() or [str(error)])[-1],
            hint=f"the job's Python there is {python}",
        ) from error
    return found


# At the other end


def answer(run_dirs: Sequence[str]) -> str:
    """Return the status of runs of this host, as one line: null if it is gone, {} if damaged."""
    paths = [RunPaths(root=Path(each)) for each in run_dirs]
    existing = [each for each in paths if each.record.exists()]
    found = [record for each in existing if (record := records.readable(each.root))]
    own = statuses([record for record in found if record.home is None], select.backend_of)
    known = {each.record.run_dir: asdict(replace(each, error=None)) for each in own}
    plain = [known.get(str(each.root), {} if each in existing else None) for each in paths]
    return MARK + json.dumps(plain)


if __name__ == "__main__":
    sys.stdout.write(answer(json.load(sys.stdin)) + "\n")
