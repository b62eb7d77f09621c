"""Find the log files of a job that clusterrun did not start, or one that is named by its path."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun.backends import foreign
from clusterrun.backends.foreign import ForeignPart
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError, UsageError
from clusterrun.hostlist import parse_hostlist
from clusterrun.logs.filename_pattern import PatternFile, expand_pattern, find_pattern_files
from clusterrun.logs.lines import Stream
from clusterrun.logs.siblings import find_numbered, find_torchrun, has_number, read_tasks
from clusterrun.paths import RunPaths
from clusterrun.state import JobState

CLOCK_SKEW_S = 5.0  # of a file server

_ERROR_NAME = re.compile(r"(?:^|[^a-z])(?:std)?err(?:ors?)?(?:[^a-z]|$)|\.e[0-9]+$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ForeignFile:
    """One file of a job: who wrote it, as far as its name says.

    `label` is the node's name where that is known, else the job's (4711, 4711_3) or the file's
    own; several files may have it, `name_files` tells them apart. `rank` is Slurm's number of the
    task, or torchrun's on its one node; `stream` is ERR for a file of stderr alone.
    """

    label: str
    path: Path
    rank: int | None = None
    stream: Stream = Stream.OUT


@dataclass(frozen=True, kw_only=True)
class ForeignJob:
    """A job that clusterrun did not start, and the files that were there at the last look.

    `job_id` is empty for a file that was named by its path; `run_dir` is set where that is a
    stamped log of one of our runs, or where the job is one of them. `state` is None where nobody
    could say it; `problem` is why Slurm could not be asked. `expected` is what Slurm was told to
    write to, as far as it says.
    """

    job_id: str
    name: str
    state: JobState | None
    files: tuple[ForeignFile, ...]
    expected: tuple[str, ...] = ()
    parts: tuple[ForeignPart, ...] = ()
    directory: Path | None = None
    run_dir: Path | None = None
    problem: str = ""


def find_foreign(text: str, cwd: Path) -> ForeignJob | None:
    """Find a job by its number (4711, 4711_3, 4711+1), or a log file by its path.

    Slurm is asked once, for a number alone. None: nobody knows such a job and no file in `cwd`
    carries its number. Raises SchedulerUnreachableError where Slurm is silent and no file does,
    ClusterrunError where the job's files may be there but can't be looked at.
    """
    if not foreign.is_job_id(text):
        return _find_by_path(cwd / text)
    try:
        parts = foreign.ask(text)
    except SchedulerUnreachableError as error:
        found = _find_by_number(text, cwd)
        if found is None:
            raise
        return replace(found, problem=error.cause or error.message)
    if not parts:
        return _find_by_number(text, cwd) or _find_by_path(cwd / text)
    parts = [replace(part, workdir=cwd / part.workdir) for part in parts]
    job = ForeignJob(
        job_id=text,
        name=parts[0].name,
        state=foreign.joint_state([part.job.state for part in parts]),
        files=(),
        expected=tuple(dict.fromkeys(_expected(parts))),
        parts=tuple(parts),
        run_dir=_run_of_batch_output(Path(parts[0].stdout)),
    )
    job = look_again(job)
    if not job.files:
        _check_access(job.expected)
    return job


def look_again(job: ForeignJob) -> ForeignJob:
    """List the files that are there now; Slurm is not asked."""
    if job.parts:
        found = [file for part in job.parts for file in _files_of(part)]
    elif job.directory:
        found = list(_numbered_files(job.job_id, job.directory))
    else:
        return job
    return replace(job, files=tuple(_distinct(found)))


def name_files(files: Iterable[ForeignFile]) -> list[str]:
    """Name each file as no other: by its label, its own name or as much of its path as it takes.

    The files of torchrun's ranks are `0/stdout.log`, `1/stdout.log`, ….
    """
    files = list(files)
    labels = Counter(file.label for file in files)
    names = [file.label if labels[file.label] == 1 else file.path.name for file in files]
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in zip(names, files, strict=True):
        places[name].append(os.path.abspath(file.path.parent))
    above = {name: os.path.commonpath(some) for name, some in places.items()}
    return [
        name if len(places[name]) == 1 else os.path.relpath(file.path, above[name])
        for name, file in zip(names, files, strict=True)
    ]


def ask_state(job: ForeignJob, *, max_age_s: float = 30.0) -> JobState:
    """Ask again how a job stands, by an answer of at most this age; UNKNOWN once it is forgotten.

    So is that of a file by its path. Raises SchedulerUnreachableError.
    """
    if not job.job_id:
        return JobState.UNKNOWN
    return foreign.current_state(job.job_id, max_age_s=max_age_s)


def _check_access(paths: Iterable[str]) -> None:
    """Tell a file that is not there from one in a directory of somebody else's."""
    for path in paths:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ClusterrunError(f"cannot read {path}", cause=error.strerror) from error


def _find_by_path(path: Path) -> ForeignJob | None:
    """Take a file for what it is: a stamped log of a run of ours, or plain text."""
    path = Path(os.path.abspath(path))
    try:
        if not path.is_file():
            return None
    except (OSError, ValueError) as error:
        raise ClusterrunError(f"cannot read {path}", cause=str(error)) from error
    run = _run_of(path)
    label = path.stem if run else path.name
    file = ForeignFile(label=label, path=path, stream=_stream(path.name))
    return ForeignJob(job_id="", name=path.name, state=None, files=(file,), run_dir=run)


def _run_of(path: Path) -> Path | None:
    """Name the run whose `logs/a<attempt>/<node>.log` a file is."""
    attempt = path.parent.name[1:]
    paths = RunPaths(root=path.parent.parent.parent)
    if not attempt.isdecimal() or paths.log(int(attempt), path.stem) != path:
        return None
    return paths.root if paths.record.is_file() else None


def _run_of_batch_output(path: Path) -> Path | None:
    paths = RunPaths(root=path.parent.parent)
    return paths.root if paths.batch_output == path and paths.record.is_file() else None


def _find_by_number(text: str, cwd: Path) -> ForeignJob | None:
    """Take the files here whose names carry a job's number, where nobody knows the job."""
    files = tuple(_numbered_files(text, cwd))
    if not files:
        return None
    return ForeignJob(job_id=text, name="", state=None, files=files, directory=cwd)


def _numbered_files(text: str, directory: Path) -> Iterator[ForeignFile]:
    job_id, _, task = text.partition("_")
    job_id = job_id.partition("+")[0]
    for path, rank in read_tasks(find_numbered([directory], job_id, task)):
        is_array = re.search(rf"{job_id}_0*{rank}(?![0-9_])", path.name)  # %A_%a
        yield _sibling(text, path, None if is_array else rank)


# The files of a part


def _files_of(part: ForeignPart) -> list[ForeignFile]:
    """List the files of a part, some of them twice: what says most about a file comes first."""
    numbers, places = _numbers(part), _places(part)
    siblings = [
        path
        for number in numbers
        for path in find_numbered(places, *number)
        if _is_new_enough(part, path)
    ]
    others = [
        _sibling(part.label, path, rank)
        for path, rank in read_tasks(siblings, restarts=part.job.restarts or 0)
    ]
    torchrun = [path for number in numbers for path in find_torchrun(places, *number)]
    return [
        *_step_files(part),
        *(file for file in others if file.rank is not None),
        *_batch_files(part),
        *others,
        *_torchrun_files(part.label, torchrun),
    ]


def _step_files(part: ForeignPart) -> Iterator[ForeignFile]:
    nodes = _nodes(part)
    for pattern, is_error in part.step_patterns:
        for found in _pattern_files(part, pattern):
            yield ForeignFile(
                label=found.node or nodes.get(found.node_index, part.label),
                path=found.path,
                rank=found.task,
                stream=Stream.ERR if is_error else Stream.OUT,
            )


def _batch_files(part: ForeignPart) -> Iterator[ForeignFile]:
    for found in _pattern_files(part, part.stdout):
        yield ForeignFile(label=part.label, path=found.path)
    for found in _pattern_files(part, part.stderr):
        yield ForeignFile(label=part.label, path=found.path, stream=Stream.ERR)


def _torchrun_files(label: str, paths: list[Path]) -> Iterator[ForeignFile]:
    """Yield what torchrun's `<run>/attempt_N/<local rank>/stdout.log` are.

    The local rank is the rank where there is one such run; each node has its own.
    """
    is_alone = len({path.parent.parent.parent for path in paths}) == 1
    for path in paths:
        rank, run = path.parent.name, path.parent.parent.parent.name
        yield ForeignFile(
            label=label if is_alone else f"{run}/{rank}",
            path=path,
            rank=int(rank) if is_alone else None,
            stream=_stream(path.name),
        )


def _sibling(label: str, path: Path, rank: int | None) -> ForeignFile:
    return ForeignFile(
        label=path.name if rank is None else label,
        path=path,
        rank=rank,
        stream=_stream(path.name),
    )


def _pattern_files(part: ForeignPart, pattern: str) -> Iterator[PatternFile]:
    """Yield the files of a pattern; without the job's number, those that it has written to."""
    for found in find_pattern_files(pattern, foreign.symbols(part), part.workdir):
        is_numbered = any(has_number(str(found.path), *number) for number in _numbers(part))
        if is_numbered or (part.job.start and _is_new_enough(part, found.path)):
            yield found


def _is_new_enough(part: ForeignPart, path: Path) -> bool:
    """Say whether a file was written to since the job's (last) start."""
    try:
        return path.stat().st_mtime >= (part.job.start or 0) - CLOCK_SKEW_S
    except OSError:
        return False


def _numbers(part: ForeignPart) -> list[tuple[str, str]]:
    """List the numbers that names carry: Slurm's own, and an array's with its task."""
    if part.array_task_id:
        own = [(part.job.job_id, "")] if part.job.job_id != part.array_job_id else []
        return [(part.array_job_id, part.array_task_id), *own]
    return [(part.job.job_id, "")]


def _places(part: ForeignPart) -> list[Path]:
    """List the directories that a part writes to."""
    outputs = [
        part.workdir / expand_pattern(pattern, foreign.symbols(part))
        for pattern in (part.stdout, part.stderr, *(p for p, _ in part.step_patterns))
        if pattern
    ]
    return list(dict.fromkeys([part.workdir, *(path.parent for path in outputs)]))


def _expected(parts: list[ForeignPart]) -> Iterator[str]:
    for part in parts:
        for pattern in (part.stdout, part.stderr):
            if pattern and foreign.NO_TASK not in pattern:
                yield str(part.workdir / expand_pattern(pattern, foreign.symbols(part)))


def _nodes(part: ForeignPart) -> dict[int | None, str]:
    """Number the nodes of a part as Slurm does, where it has any."""
    if not part.job.nodelist:
        return {}
    try:
        return dict(enumerate(parse_hostlist(part.job.nodelist)))
    except UsageError:
        return {}


def _stream(name: str) -> Stream:
    return Stream.ERR if _ERROR_NAME.search(name) else Stream.OUT


def _distinct(files: Iterable[ForeignFile]) -> Iterator[ForeignFile]:
    """Keep the first of each path."""
    seen: dict[str, ForeignFile] = {}
    for file in files:
        seen.setdefault(os.path.normpath(file.path), file)
    return iter(seen.values())
