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
_HOME_MAY_CHANGE: Final = ("job_id", "earlier_job_ids", "resumed_at", *records.SHAPE)


def ask(runs: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of runs with a home elsewhere; UNKNOWN and `error` if it does not answer.

    Also update the records here with the jobs that continue a run. A host that this user has not
    used for the run is not asked.
    """
    known: dict[str, JobStatus] = {}
    groups: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)  # by host and interpreter
    for record in runs:
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
    return [known[record.run_dir] for record in runs]


def _unknown(record: JobRecord, error: ClusterrunError | None = None, **why: Any) -> JobStatus:
    return JobStatus(record=record, state=JobState.UNKNOWN, error=error, **why)


def _statuses_from(home: tuple[str, str], group: Sequence[JobRecord]) -> list[JobStatus]:
    """Return the status of runs of one host; if it does not answer, UNKNOWN for each."""
    host, python = home
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
        status: JobStatus = decoded(JobStatus, answer)
        new = replace(record, **{name: getattr(status.record, name) for name in _HOME_MAY_CHANGE})
        keeps_all = {*new.job_ids} >= {*record.job_ids}
        is_sane = 0 < len(new.job_ids) <= MOST_JOBS and all(each.is_own for each in new.job_ids)
        if keeps_all and is_sane:
            if new.job_ids != record.job_ids:
                remember(new)
            return replace(status, record=new)
    return _unknown(record, nonsense(host))


def remember(record: JobRecord) -> None:
    """Write a run's record, and let its job ids name it, except those of other runs here."""
    remember_number(record.job_id.number)  # ids that are taken here later are larger
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
    try:  # ValueError: there is not exactly one such line, or its content is wrong
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        answers: list[Any] = decoded(list[Any], json.loads(line.removeprefix(MARK)))
        if len(answers) != len(run_dirs):
            raise ValueError("the answer has an unexpected number of runs")
    except (ValueError, RecursionError) as error:
        text = f"clusterrun does not start on {host}, or its version differs"
        cause = (done.stderr.strip().splitlines() or [str(error)])[-1]
        hint = f"check on {host}: {python} -m clusterrun --version"
        raise ClusterrunError(text, cause=cause, hint=hint) from error
    return answers


# At the other end


def answer(run_dirs: Sequence[str]) -> str:
    """Return, as one line, the status of runs here: null if gone, {} if damaged or elsewhere."""
    runs = [RunPaths(root=Path(each)) for each in run_dirs]
    existing = [run for run in runs if run.record.exists()]
    readable = [record for run in existing if (record := records.readable(run.root))]
    own = statuses([record for record in readable if record.home is None], select.backend_of)
    known = {job.record.run_dir: asdict(replace(job, error=None)) for job in own}
    answers = [known.get(str(run.root), {} if run in existing else None) for run in runs]
    return MARK + json.dumps(answers)


if __name__ == "__main__":
    sys.stdout.write(answer(json.load(sys.stdin)) + "\n")
