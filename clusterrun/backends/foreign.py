"""Ask Slurm where a job writes that clusterrun did not start."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun import shell
from clusterrun.backends import cache
from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm_query import (
    SACCT_FIELDS,
    SEPARATOR,
    environment,
    parse_sacct,
    parse_scontrol,
)
from clusterrun.errors import SchedulerUnreachableError
from clusterrun.state import JobState

NO_TASK = "4294967294"  # what Slurm writes for %a of a job that is no array task
MAX_SCRIPT_BYTES = 1024 * 1024

_JOB = re.compile(r"[0-9]+(?:[_+][0-9]+)?\Z")
_NEXT_JOB = re.compile(r"^(?=JobId=[0-9]+ )", re.MULTILINE)
_HEAD = re.compile(
    r"JobId=(?P<id>[0-9]+) (?:ArrayJobId=(?P<array>[0-9]+) (?:ArrayTaskId=(?P<task>\S+) )?)?"
    r"(?:ArrayTaskThrottle=\S+ )?(?:HetJobId=(?P<het>[0-9]+) HetJobOffset=(?P<offset>[0-9]+) )?"
    r"JobName=(?P<name>.*) (?:HetJobIdSet=\S+ )?UserId=(?P<user>[^ (]*)\([0-9]+\) GroupId=",
    re.DOTALL,
)
# The values are free text; a value ends where the next field may begin. Only batch jobs have the
# last three.
_PLACE = (
    r" Command=(?P<command>.*?) WorkDir=(?P<workdir>.*?)"
    r"(?: (?:\w*Comment|SubmitLine|Switches|BurstBuffer\w*|BatchFeatures|Container\w*)=.*)?"
)
_STREAMS = r" StdErr=(?P<stderr>.*) StdIn=.*? StdOut=(?P<stdout>.*?)"
_REST = r"(?: (?:Power|Mail(?:User|Type)|\w*Tres\w*|NtasksPerTRES\S*?|SubmitLine)=.*)?\s*\Z"
_TAILS = (
    re.compile(_PLACE + _STREAMS + _REST, re.DOTALL),
    re.compile(_PLACE + _REST, re.DOTALL),
)
_UNIT = "\x1f"  # between sacct's fields: no text has it
_ROW_FIELDS = (*SACCT_FIELDS, "JobIDRaw", "User", "JobName", "WorkDir", "SubmitLine")
_NEXT_ROW = re.compile(rf"^(?=[0-9][0-9_+%,\[\]-]*(?:\.\w+)?{_UNIT})", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ForeignPart:
    """A job, a task of an array or a part of a heterogeneous job, as Slurm knows it.

    `label` is how people name it (4711, 4711_3, 4711+1), `job.job_id` the number that Slurm gave
    it. `stdout` and `stderr` are filename patterns of the batch shell ("" for a job without one),
    which slurmctld gives with some symbols replaced already, `step_patterns` those that
    its `srun` lines name, each with whether it is for stderr; all may be relative to `workdir`,
    which is relative itself where accounting does not say it (yet).
    """

    job: SchedulerJob
    label: str
    name: str
    user: str
    workdir: Path
    stdout: str
    stderr: str
    array_job_id: str
    array_task_id: str
    step_patterns: tuple[tuple[str, bool], ...] = ()


def is_job_id(text: str) -> bool:
    """Say whether a text is a job's number, with an array task or a part: 4711, 4711_3, 4711+1."""
    return _JOB.match(text) is not None


def ask(job_id: str) -> list[ForeignPart]:
    """Ask slurmctld about a job, and accounting where it has forgotten it; [] where nobody knows.

    Raises SchedulerUnreachableError where the one that could know does not answer.
    """
    if shell.find("scontrol") is None:
        return []
    done = shell.run(["scontrol", "--oneliner", "show", "job", job_id], env=environment())
    if done.rc == 0:
        return parse_parts(done.stdout)
    said = (done.stderr + done.stdout).strip()
    if "Invalid job id" not in said and "not found" not in said:
        raise SchedulerUnreachableError("scontrol failed", cause=said)
    return _ask_accounting(job_id)


def current_state(job_id: str, *, max_age_s: float = cache.TTL_S) -> JobState:
    """Ask how a job stands, by an answer of at most this age; UNKNOWN where nobody knows it.

    Raises SchedulerUnreachableError.
    """
    answer = cache.through(
        ("foreign", job_id), max_age_s, lambda: {part.label: part.job for part in ask(job_id)}
    )
    return joint_state([job.state for job in answer.values()])


def joint_state(states: Sequence[JobState]) -> JobState:
    """Say how a job of several parts stands: active while one is, else as badly as the worst."""
    for wanted in (JobState.RUNNING, JobState.COMPLETING):
        if wanted in states:
            return wanted
    active = [state for state in states if not state.is_terminal]
    failed = [state for state in states if not state.is_success]
    return (active or failed or list(states) or [JobState.UNKNOWN])[0]


# scontrol


def parse_parts(text: str) -> list[ForeignPart]:
    """Read `scontrol --oneliner show job`: one line a part, newlines in names included."""
    parts = (_parse_part(row) for row in _NEXT_JOB.split(text) if row.strip())
    return [part for part in parts if part is not None]


def _parse_part(row: str) -> ForeignPart | None:
    head = _HEAD.match(row)
    tails = [found for tail in _TAILS if head and (found := tail.search(row, head.end()))]
    if head is None or not tails:
        return None
    place = {"stdout": "", "stderr": "", **tails[0].groupdict()}
    raw_id, array, task = head["id"], head["array"], head["task"] or ""
    (job,) = parse_scontrol(" ".join(row.splitlines()), [raw_id]).values()
    return ForeignPart(
        job=job,
        label=_label(raw_id, array, task, head["het"], head["offset"]),
        name=head["name"],
        user=head["user"],
        workdir=Path(place["workdir"]),
        stdout=place["stdout"],
        stderr=place["stderr"],
        array_job_id=array or raw_id,
        array_task_id=task if task.isdigit() else "",
        step_patterns=tuple(_srun_patterns(_read_script(place["command"]))),
    )


def _label(raw_id: str, array: str | None, task: str, het: str | None, offset: str | None) -> str:
    if array:
        return f"{array}_{task}" if task.isdigit() else array
    return f"{het}+{offset}" if het and offset != "0" else raw_id


# sacct


def _ask_accounting(job_id: str) -> list[ForeignPart]:
    argv = ["sacct", "--noheader", "--parsable2", f"--delimiter={_UNIT}", f"--jobs={job_id}"]
    if shell.find(argv[0]) is None:
        return []
    done = shell.run([*argv, f"--format={','.join(_ROW_FIELDS)}"], env=environment(), tries=1)
    if done.rc == 0:
        return parse_rows(done.stdout)
    if "accounting storage is disabled" in done.stderr:
        return []
    cause = (done.stderr.strip().splitlines() or ["sacct failed"])[-1]
    raise SchedulerUnreachableError(
        f"slurmctld does not know job {job_id} any more, and accounting does not answer",
        cause=cause,
    )


def parse_rows(text: str) -> list[ForeignPart]:
    """Read what accounting knows of jobs and, in the rows after each, of its steps."""
    jobs: list[list[str]] = []
    steps: list[list[str]] = []  # of each job, what srun was called with
    for row in _NEXT_ROW.split(text):
        values = row.removesuffix("\n").split(_UNIT)
        if len(values) != len(_ROW_FIELDS):
            continue
        if "." not in values[0]:
            jobs.append(values)
            steps.append([])
        elif jobs:
            steps[-1].append(values[-1])
    return [_remembered(values, lines) for values, lines in zip(jobs, steps, strict=True)]


def _remembered(values: Sequence[str], step_lines: Sequence[str]) -> ForeignPart:
    label, fields = values[0], values[: len(SACCT_FIELDS)]
    raw_id, user, name, workdir, line = values[len(SACCT_FIELDS) :]
    (job,) = parse_sacct(SEPARATOR.join(fields)).values()
    array, _, tasks = label.partition("_")
    task = tasks if tasks.isdigit() else ""
    options, script = _submitted_with(line.split(), Path(workdir))
    text = _read_script(script)
    options = {**_script_options(text), **options}
    default = "slurm-%A_%a.out" if tasks else "slurm-%j.out"
    stdout = options.get("output", default)
    return ForeignPart(
        job=replace(job, job_id=raw_id),
        label=label.removesuffix("+0"),
        name=name,
        user=user,
        workdir=Path(workdir),
        stdout=stdout,
        stderr=options.get("error", stdout),
        array_job_id=array if tasks else raw_id,
        array_task_id=task,
        step_patterns=tuple(_srun_patterns("\n".join([*step_lines, text]))),
    )


# What the job was submitted with


_NAMES = {"-o": "output", "--output": "output", "-e": "error", "--error": "error"}


def _options(words: Sequence[str]) -> dict[str, str]:
    """Find the options that name files; the last of each wins.

    >>> _options(["-oa", "--error", "b", "--output=c"])
    {'output': 'c', 'error': 'b'}
    """
    found = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _NAMES and not (equals and name in ("-o", "-e")):
            value = value if equals else "".join(words[place + 1 : place + 2])
            found[_NAMES[name]] = value
        elif word[:2] in _NAMES and not word.startswith("--"):
            found[_NAMES[word[:2]]] = word[2:]
    return found


def _submitted_with(words: Sequence[str], workdir: Path) -> tuple[dict[str, str], str]:
    """Read sbatch's own options and its script; accounting keeps the words without their quotes.

    What comes after the script is the script's. Behind `--wrap` its text can't be told from
    further options; what stands before it is certain.
    """
    for place, word in enumerate(words[1:], start=1):
        if word.startswith("--wrap"):
            return {**_options(words[place:]), **_options(words[:place])}, ""
        if words[place - 1] not in _NAMES and not word.startswith("-") and _is_file(workdir / word):
            return _options(words[:place]), str(workdir / word)
    return _options(words), ""


def _script_options(text: str) -> dict[str, str]:
    """Read the #SBATCH lines above the first command, of a job's first part alone."""
    words: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.split() == ["#SBATCH", "hetjob"]:
            break
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
    return _options(words)


def _srun_patterns(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the filename patterns of srun lines that differ by task, node, step or job.

    Those that the shell would have to complete are left out.
    """
    for line in text.replace("\\\n", " ").splitlines():
        _, srun, rest = line.partition("srun ")
        if not srun or line.lstrip().startswith("#"):
            continue
        for name, pattern in _options(_words(rest)).items():
            if "%" in pattern and not {"$", "`"} & set(pattern):
                yield pattern, name == "error"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that ends on another line, or accounting's words
        return text.split()


def _read_script(command: str) -> str:
    """Read the batch script, the first words of a command; "" where it can't be read."""
    words = command.split(" ")
    for count in range(1, len(words) + 1):  # its name may have spaces
        path = Path(" ".join(words[:count]))
        if path.is_absolute() and _is_file(path):
            try:
                with path.open("rb") as file:
                    return file.read(MAX_SCRIPT_BYTES).decode("utf-8", "replace")
            except OSError:
                return ""
    return ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def symbols(part: ForeignPart) -> dict[str, str]:
    """Say what the symbols of a filename pattern stand for that are the same for every task."""
    known = {
        "j": part.job.job_id,
        "A": part.array_job_id,
        "a": part.array_task_id or NO_TASK,
        "u": part.user,
        "x": part.name,
    }
    if part.job.restarts is not None:
        known["r"] = str(part.job.restarts)
    return known
