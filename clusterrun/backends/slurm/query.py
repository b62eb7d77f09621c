"""Query Slurm about jobs, as text with named fields; separate functions run and parse.

Do not use `--json`, whose shape changes between versions, or fields that Slurm 22.05 lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.environment import scrubbed
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import state_dir
from clusterrun.shared import shell
from clusterrun.shared.amounts import parse_span
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.locks import locked
from clusterrun.shared.state import JobId, JobState, parse_slurm_state
from clusterrun.shared.typed import decoded

# What squeue and sacct are to print of a job, by scontrol's names. The reason comes last: it is the
# only free text, and a separator in it does no harm.
SQUEUE_FIELDS: Final = {
    **{"JobId": "%i", "JobState": "%T", "NodeList": "%N", "RunTime": "%M", "TimeLimit": "%l"},
    **{"StartTime": "%S", "EndTime": "%e", "Partition": "%P", "NumNodes": "%D", "Reason": "%r"},
}
SACCT_FIELDS: Final = {
    **{"JobId": "JobID", "JobState": "State", "ExitCode": "ExitCode", "NodeList": "NodeList"},
    **{"RunTime": "ElapsedRaw", "TimeLimit": "TimelimitRaw", "StartTime": "Start"},
    **{"EndTime": "End", "Reason": "Reason"},
}
SEPARATOR = "|"
PRINTED_S = 3.0  # for what doctor asks: less than it waits for a check
CLOCK_SKEW_S = 3600.0
TTL_S = 10.0  # of an answer that is kept for all processes of a user
FORGET_S = 3600.0  # since it was last requested
YEAR_S = 365 * 86400  # what Slurm gives a job without a time limit at its start
# Slurm keeps these reasons for waiting after a job was cancelled.
WAITING = frozenset({"Priority", "Resources", "BeginTime", "JobHeldUser", "JobHeldAdmin"})

Answer = dict[str, SchedulerJob]
T = TypeVar("T")


def call(
    slurm_cluster: str | None,
    program: str,
    *words: str,
    tries: int = shell.TRIES,
    timeout_s: float | None = None,
) -> shell.Completed:
    """Run a Slurm command without the user's filters; times are printed as epochs.

    `slurm_cluster` is None if there is only one. Raises SchedulerUnreachableError.
    """
    cluster = [f"--clusters={slurm_cluster}"] if slurm_cluster else []
    environ = {**scrubbed(os.environ), "SLURM_TIME_FORMAT": "%s"}
    return shell.run([program, *cluster, *words], env=environ, tries=tries, timeout_s=timeout_s)


def printed(slurm_cluster: str | None, program: str, *words: str) -> str:
    """Return what a command prints, which is tried once. Raises SchedulerUnreachableError."""
    done = call(slurm_cluster, program, *words, tries=1, timeout_s=PRINTED_S)
    if done.rc != 0:
        raise SchedulerUnreachableError(f"{program} failed", cause=done.stderr.strip())
    return done.stdout


def cached(key: Sequence[str], max_age_s: float, ask: Callable[[], T], kind: Any = Answer) -> T:
    """Return an answer of type `kind` that is at most `max_age_s` old; call `ask` if there is none.

    The process that asks holds a lock, and the others wait for its answer. Nothing is cached if
    the directory can't be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            whole = json.dumps([os.environ.get("SLURM_CONF", ""), *key])
            file = _directory() / f"{hashlib.sha256(whole.encode()).hexdigest()[:24]}.json"
            stack.enter_context(locked(file.with_suffix(".lock")))
        except (OSError, ClusterrunError):
            return ask()
        data = read_json(file) or {}
        with contextlib.suppress(ValueError):
            if 0 <= time.time() - decoded(float, data.get("asked_at")) < max_age_s:
                found: T = decoded(kind, data.get("answer"))
                return found
        answer = ask()
        with contextlib.suppress(OSError):
            kept = {"asked_at": time.time(), "answer": answer}
            write_whole(file, json.dumps(kept, default=dataclasses.asdict))
            oldest = time.time() - FORGET_S  # of the answers to other queries
            for entry in os.scandir(file.parent):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)
        return answer


def forget() -> None:
    """Delete all answers: jobs have just changed."""
    with contextlib.suppress(OSError):
        for file in _directory().glob("*.json"):
            file.unlink(missing_ok=True)


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "clusterrun" if runtime else state_dir() / "cache"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def ask(
    job_ids: Sequence[str], *, slurm_cluster: str | None = None, since: float | None = None
) -> dict[str, SchedulerJob]:
    """Ask squeue, then sacct and scontrol for what is missing. Raises SchedulerUnreachableError."""
    asked_at = time.time()
    # squeue loads the jobs of all users, unless it is given a user or a single job.
    user = [f"--user={os.getuid()}"] if len(job_ids) > 1 else []
    jobs, fields = ",".join(job_ids), SEPARATOR.join(SQUEUE_FIELDS.values())
    found = parse_squeue(_squeue(slurm_cluster, *user, f"--jobs={jobs}", f"--format={fields}"))
    ended = [job_id for job_id in job_ids if _needs_more(found.get(job_id))]
    if ended:
        history, problem = _ask_sacct(ended, slurm_cluster, since)
        found |= {job_id: _merge(found.get(job_id), job) for job_id, job in history.items()}
        without_exit = [id_ for id_ in ended if id_ in found and _needs_more(found[id_])]
        found |= _ask_scontrol(without_exit, slurm_cluster)
        if problem:
            note = f"slurmctld no longer knows this job; accounting does not answer: {problem}"
            unknown = SchedulerJob(job_id="", state=JobState.UNKNOWN, source="", note=note)
            found |= {id_: replace(unknown, job_id=id_) for id_ in {*ended} - found.keys()}
    return {job_id: replace(job, asked_at=asked_at) for job_id, job in found.items()}


def _needs_more(job: SchedulerJob | None) -> bool:
    """Return whether squeue didn't know a job, or knew only that it has ended."""
    return job is None or (job.state.is_terminal and job.exit_code is None)


def _merge(live: SchedulerJob | None, history: SchedulerJob) -> SchedulerJob:
    """Take what accounting says of an ended job, unless it lags behind slurmctld."""
    if live is None:
        return history
    if not history.state.is_terminal:
        return live
    return replace(history, reason=live.reason or history.reason)


# squeue


def _squeue(slurm_cluster: str | None, *options: str) -> str:
    done = call(slurm_cluster, "squeue", "--noheader", "--states=all", *options)
    # squeue silently omits an unknown job among several; alone, it is an error.
    if done.rc != 0 and "Invalid job id" not in done.stderr:
        raise SchedulerUnreachableError("squeue failed", cause=done.stderr.strip())
    return done.stdout


def parse_squeue(text: str) -> dict[str, SchedulerJob]:
    """Parse squeue's lines; skip lines of another shape (`CLUSTER: x`).

    >>> parse_squeue("11|PENDING||0:00|10:00|N/A|N/A|gpu|2|Priority")["11"].asked_nodes
    2
    """
    return {row["JobId"]: _job("squeue", row) for row in rows(text, SQUEUE_FIELDS)}


def rows(text: str, fields: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the values of each line by their fields; skip lines with too few."""
    found = (line.split(SEPARATOR, len(fields) - 1) for line in text.splitlines())
    return (dict(zip(fields, row, strict=True)) for row in found if len(row) == len(fields))


def _job(source: str, row: Mapping[str, str], *, limit_unit_s: int = 1) -> SchedulerJob:
    """Return a job from a row's fields; a bare time limit counts units of `limit_unit_s`."""
    fields = defaultdict(str, row)
    state, reason = parse_slurm_state(fields["JobState"]), fields["Reason"]
    nodes = fields["NodeList"]
    nodelist = "" if nodes in ("(null)", "None assigned") else nodes
    has_started = bool(nodelist) and state not in (JobState.PENDING, JobState.UNKNOWN)
    has_old_reason = state.is_terminal and reason in WAITING
    code, signal = parse_exit(fields["ExitCode"]) if state.is_terminal else (None, None)
    limit_s = parse_clock(fields["TimeLimit"], bare_s=limit_unit_s)
    start, asked = parse_time(fields["StartTime"]), fields["NumNodes"]
    return SchedulerJob(
        job_id=fields["JobId"],
        source=source,
        state=state,
        reason="" if has_old_reason or reason in ("None", "(null)") else reason,
        nodelist=nodelist,
        elapsed_s=parse_clock(fields["RunTime"]) if has_started else None,
        limit_s=None if limit_s == YEAR_S else limit_s,  # a year means that there is none
        start=start if has_started else None,
        expected_start=start if state is JobState.PENDING else None,
        end=parse_time(fields["EndTime"]) if state.is_terminal else None,
        exit_code=code,
        exit_signal=signal,
        # What Slurm considers now: a job may be changed while it waits.
        partition=fields["Partition"],
        asked_nodes=int(asked) if asked.isdecimal() else None,
    )


# sacct


def _ask_sacct(
    job_ids: Sequence[str], slurm_cluster: str | None, since: float | None
) -> tuple[dict[str, SchedulerJob], str]:
    """Return what accounting knows, and why it doesn't answer (empty if it does)."""
    if shell.find("sacct") is None:
        return {}, "sacct was not found"
    argv = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(job_ids)}"]
    argv.append(f"--format={','.join(SACCT_FIELDS.values())}")
    if since is not None:  # without it some sites search years of jobs, others refuse
        day = datetime.fromtimestamp(since - CLOCK_SKEW_S)
        argv.append(f"--starttime={day:%Y-%m-%dT%H:%M:%S}")
    try:
        done = call(slurm_cluster, *argv, tries=1)
    except SchedulerUnreachableError as error:
        return {}, error.cause or error.message
    if done.rc != 0:
        return {}, (done.stderr.strip().splitlines() or ["sacct failed"])[-1]
    return parse_sacct(done.stdout), ""


def parse_sacct(text: str) -> dict[str, SchedulerJob]:
    """Parse sacct's lines; keep the last line of a job that ran several times.

    >>> parse_sacct("10|FAILED|3:0|node1|0|UNLIMITED|1795257574|1795257574|None")["10"].exit_code
    3
    """
    found = rows(text, SACCT_FIELDS)
    return {row["JobId"]: _job("sacct", row, limit_unit_s=60) for row in found}


# scontrol


def _ask_scontrol(job_ids: Sequence[str], slurm_cluster: str | None) -> dict[str, SchedulerJob]:
    """Query each job: scontrol takes no list."""
    jobs: dict[str, SchedulerJob] = {}
    for job_id in job_ids:
        done = call(slurm_cluster, "scontrol", "--oneliner", "show", "job", job_id, tries=1)
        for line in done.stdout.splitlines() if done.rc == 0 else ():
            if line.startswith("JobId="):
                jobs[job_id] = parse_scontrol(line)
    return jobs


def parse_scontrol(line: str) -> SchedulerJob:
    """Parse a line of `scontrol --oneliner show job`.

    Slurm's own fields follow the job's name, so they override a name that imitates a field. The
    command, its directory and the comment are cut off.
    """
    found = pairs(line.rpartition(" Command=")[0])
    return _job("scontrol", {**found, "JobId": line.partition(" ")[0].removeprefix("JobId=")})


def outputs_of(job_id: str) -> tuple[frozenset[JobState], tuple[str, ...]]:
    """Return the states of any job and its array tasks, and the files of their output.

    Both are empty if slurmctld has forgotten the job. Raises SchedulerUnreachableError.
    """
    done = call(None, "scontrol", "--oneliner", "show", "job", job_id, tries=1)
    lines = done.stdout.splitlines() if done.rc == 0 else []
    logs = dict.fromkeys(log for line in lines for log in _output_files(line))
    return frozenset(parse_scontrol(line).state for line in lines), tuple(logs)


def _output_files(line: str) -> list[str]:
    """Return the files of a job's errors and output.

    >>> _output_files("JobId=7 StdErr=/a b.err StdIn=/dev/null StdOut=/a b.out ")  # Slurm 24.11
    ['/a b.err', '/a b.out']
    """
    found = re.search(r".* StdErr=(.*?) StdIn=.*? StdOut=(.*?)(?: \w+=| *\Z)", line)
    return list(filter(None, found.groups())) if found else []


def pairs(text: str) -> dict[str, str]:
    """Parse `Name=value`, or lines of `Name   = value`; of several for a name, take the last."""
    return dict(re.findall(r"(?:^| )(\w+)(?:=| += )(\S*)", text, re.MULTILINE))


def find_by_command(
    run_dir: str, slurm_cluster: str | None, *, known: Collection[str] = ()
) -> JobId | None:
    """Return this user's newest job for a run directory that is not in `known`; None without one.

    Before Slurm 23.02 the script's arguments follow its path.
    """
    listed = _squeue(slurm_cluster, f"--user={os.getuid()}", f"--format=%A{SEPARATOR}%o")
    found = [line.partition(SEPARATOR) for line in listed.splitlines()]
    script = f"{RunPaths(root=Path(run_dir)).script} "
    ids = [int(job_id) for job_id, _, command in found if f"{command} ".startswith(script)]
    new = [job_id for job_id in ids if str(job_id) not in known]
    return JobId(str(max(new))) if new else None


# Values


def parse_clock(text: str, *, bare_s: int = 1) -> int | None:
    """Return a duration that Slurm printed, in seconds; None for other text, such as UNLIMITED.

    >>> parse_clock("0:02"), parse_clock("1-02:03:04"), parse_clock("UNLIMITED")
    (2, 93784, None)
    """
    found = parse_span(text, bare_s=bare_s)
    return None if found is None else int(found)


def parse_time(text: str) -> float | None:
    """Parse a time in epoch seconds; None for 0 and for other text.

    >>> parse_time("1795257574"), parse_time("Unknown")
    (1795257574.0, None)
    """
    seconds = float(text) if text.isdecimal() else 0.0
    return seconds or None


def parse_exit(text: str) -> tuple[int | None, int | None]:
    """Parse `code:signal`; signal 0 means none.

    >>> parse_exit("3:0"), parse_exit("0:9"), parse_exit("")
    ((3, None), (0, 9), (None, None))
    """
    match = re.match(r"([0-9]{1,9}):([0-9]{1,9})\Z", text)
    if match is None:
        return None, None
    return int(match[1]), int(match[2]) or None
