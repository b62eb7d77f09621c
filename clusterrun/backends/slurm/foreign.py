"""Query slurmctld about a job that clusterrun did not start: its state and its output files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm.query import call, parse_scontrol
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.shared import shell
from clusterrun.shared.job_id import JobId
from clusterrun.shared.state import JobState

_NEXT_JOB = re.compile(r"^(?=JobId=[0-9]+ )", re.MULTILINE)
_PAIR = re.compile(r"\b(\w+)=(\S*)")
_NEXT_FIELD = re.compile(r" [A-Z]\w{0,99}=")


@dataclass(frozen=True, kw_only=True)
class ForeignPart:
    """A job, a task of an array or a component of a heterogeneous job.

    `label` is its usual name: 4711, 4711_3, 4711+1. `stdout` and `stderr` are the batch
    script's files as scontrol names them, empty for a job without a batch script. Slurm 22.05
    leaves filename patterns in them that only a node can replace, such as %N.
    """

    job: SchedulerJob
    label: str
    stdout: str
    stderr: str


def is_job_id(text: str) -> bool:
    """Return whether a text is a job id, with or without task: 4711, 4711_3, 4711+1."""
    found = JobId.read(text)
    return bool(found) and not found.is_own


def ask(job_id: str) -> list[ForeignPart]:
    """Query slurmctld about a job; [] for an unknown id. Raises SchedulerUnreachableError."""
    if shell.find("scontrol") is None:
        return []
    done = call(None, "scontrol", "--oneliner", "show", "job", job_id)
    if done.rc == 0:
        return parse_parts(done.stdout)
    answer = (done.stderr + done.stdout).strip()
    if "Invalid job id" in answer or "not found" in answer:
        return []
    raise SchedulerUnreachableError("scontrol failed", cause=answer)


def joint_state(states: Sequence[JobState]) -> JobState:
    """Return the state of a job of several parts: active while any part is, else the worst."""
    for wanted in (JobState.RUNNING, JobState.COMPLETING):
        if wanted in states:
            return wanted
    active = [state for state in states if not state.is_terminal]
    failed = [state for state in states if not state.is_success]
    return (active or failed or list(states) or [JobState.UNKNOWN])[0]


def parse_parts(text: str) -> list[ForeignPart]:
    """Parse `scontrol --oneliner show job`: one row per part; names may contain newlines."""
    return [_parse_part(row) for row in _NEXT_JOB.split(text) if row.startswith("JobId=")]


def _parse_part(row: str) -> ForeignPart:
    ids = dict(_PAIR.findall(row.partition(" JobName=")[0]))
    (job,) = parse_scontrol(" ".join(row.splitlines()), [ids["JobId"]]).values()
    # The last three fields of a batch job; comments, which are free text, come before them.
    # The fields that follow differ between versions. File names may contain spaces.
    stderr, _, rest = row.rpartition(" StdErr=")[2].partition(" StdIn=")
    _, is_batch, stdout = rest.partition(" StdOut=")
    return ForeignPart(
        job=job,
        label=_label(ids),
        stdout=_NEXT_FIELD.split(stdout, 1)[0].rstrip(),
        stderr=stderr if is_batch else "",
    )


def _label(ids: dict[str, str]) -> str:
    array, task = ids.get("ArrayJobId"), ids.get("ArrayTaskId", "")
    if array:
        return f"{array}_{task}" if task.isdigit() else array
    component = ids.get("HetJobOffset", "0")
    return f"{ids['HetJobId']}+{component}" if component != "0" else ids["JobId"]
