"""Ask the hosts that have the run directories for the status of their runs, all at once.

`python -m clusterrun.backends.hosts.homes` answers there, on its standard output.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from clusterrun.backends import select
from clusterrun.backends.hosts.openssh import SSH_FAILED, module, nonsense, silent, ssh
from clusterrun.backends.local.job_ids import remember_number
from clusterrun.backends.status import JobStatus, statuses
from clusterrun.errors import ClusterrunError, NotAdoptedError
from clusterrun.rundir import record as records
from clusterrun.rundir.known_roots import adopted
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import shell
from clusterrun.shared.state import JobState
from clusterrun.shared.typed import decoded

ANSWER_S: Final = 10.0
ANSWER_BYTES: Final = 16 << 20
AT_ONCE: Final = 32
MOST_JOBS: Final = 1000  # of one run
MARK: Final = "clusterrun.homes/1 "  # a login script there may print lines of its own
# What a run's home may change in the record here.
_THEIRS: Final = (
    *("job_id", "earlier_job_ids", "chained_job_ids", "chain_length", "resumed_at"),
    *("nodes", "procs_per_node", "gpus_per_node", "world_size", "strategy", "device"),
    "time_minutes",
)


def ask(found: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of runs with a home elsewhere; UNKNOWN and `error` if it does not answer.

    Record here which jobs have continued them. A host that this user has not used for the run is
    not asked.
    """
    answers: dict[str, JobStatus] = {}
    hosts: dict[tuple[str, str], list[tuple[str, JobRecord]]] = defaultdict(list)
    for record in found:
        try:
            own = adopted(record)
        except NotAdoptedError as error:
            answers[record.run_dir] = _unknown(record, error, reason=error.message)
        else:
            assert own.home
            hosts[own.home.host, own.home.python].append((own.home.run_dir, own))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for statuses_there in pool.map(lambda item: _ask_for(*item), hosts.items()):
            answers |= {status.record.run_dir: status for status in statuses_there}
    return [answers[record.run_dir] for record in found]


def _unknown(record: JobRecord, error: ClusterrunError | None = None, **why: Any) -> JobStatus:
    return JobStatus(record=record, state=JobState.UNKNOWN, error=error, **why)


def _ask_for(place: tuple[str, str], group: Sequence[tuple[str, JobRecord]]) -> list[JobStatus]:
    """Return the status of runs of one host, by their directories there."""
    host, python = place
    try:
        answer = _answer(host, python, [at for at, _ in group])
    except ClusterrunError as error:
        return [_unknown(record, error) for _, record in group]
    known = {status.record.run_dir: status for status in answer if status}
    is_whole = len(known) == len(answer)
    return [_here(record, host, known.get(at), is_whole) for at, record in group]


def _here(record: JobRecord, host: str, there: JobStatus | None, is_whole: bool) -> JobStatus:
    """Return a status with the run's record here, brought up to date.

    The host decides only how its run is, and which jobs continue it.
    """
    if there is None and is_whole:
        return _unknown(record, notes=(f"its run directory is gone from {host}",))
    if there is not None:
        new = replace(record, **{name: getattr(there.record, name) for name in _THEIRS})
        is_grown = {*new.job_ids} >= {*record.job_ids} and 0 < len(new.job_ids) <= MOST_JOBS
        if is_grown and all(job_id.is_own for job_id in new.job_ids):
            if new.job_ids != record.job_ids:
                remember(new)
            return replace(there, record=new)
    return _unknown(record, nonsense(host))


def remember(record: JobRecord) -> None:
    """Record here which jobs continue a run, so that their ids name it and are not used again.

    An id that names another run here keeps that meaning.
    """
    remember_number(record.job_id.number)
    try:
        records.update(record.paths, lambda _: record)
        for job_id in record.job_ids:
            if not record.runs_dir.job_link(job_id).exists():
                records.link_job(record.runs_dir, job_id, record.paths)
    except (OSError, ClusterrunError):  # not writable; the run keeps its other names
        return


def _answer(host: str, python: str, run_dirs: Sequence[str]) -> list[JobStatus | None]:
    """Ask one host. What makes no sense in the answer is None.

    Raises SchedulerUnreachableError, ClusterrunError.
    """
    argv = ssh(host, module(python, __name__))
    done = shell.run_once(argv, ANSWER_S, input=json.dumps(run_dirs), most=ANSWER_BYTES)
    if done.rc in (shell.TIMED_OUT, SSH_FAILED):
        raise silent(host, done.stderr or f"no answer within {ANSWER_S:.0f} s")
    try:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        found: list[JobStatus | None] = []
        for each in decoded(list[Any], json.loads(line.removeprefix(MARK))):
            try:
                found.append(decoded(JobStatus, each))
            except ValueError:
                found.append(None)
    except (ValueError, RecursionError) as error:
        raise ClusterrunError(
            f"clusterrun does not run on {host}, or is of another version",
            cause=(done.stderr.strip().splitlines() or [str(error)])[-1],
            hint=f"its Python is {python}",
        ) from error
    return found


# At the other end


def answer(run_dirs: Iterable[str]) -> str:
    """Return the status of runs of this host, as one line of text."""
    paths = [RunPaths(root=Path(each)) for each in run_dirs]
    read = [records.readable(each.root) for each in paths if each.record.exists()]
    found = [record for record in read if record]
    damaged = [None] * (len(read) - len(found))  # these are not gone
    known = statuses([record for record in found if record.home is None], select.backend_of)
    plain = [asdict(replace(status, error=None)) for status in known]
    return MARK + json.dumps([*plain, *damaged])


if __name__ == "__main__":
    sys.stdout.write(answer(json.load(sys.stdin)) + "\n")
