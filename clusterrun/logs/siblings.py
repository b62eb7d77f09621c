"""Find files that carry a job's number in their names, and read task numbers from such names."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SUFFIXES = frozenset({".out", ".err", ".log", ".txt", ".stdout", ".stderr"})

_DIGITS = re.compile(r"([0-9]+)")
# `4711_0_log.out` is submitit's; its task number stands behind the job's and the array task's.
_SUBMITIT = re.compile(r"[0-9]+(?:_[0-9]+)?_(?P<task>[0-9]+)_log\.(?:out|err)\Z")
# A number behind one of these is no task's.
_NO_TASK = re.compile(
    r"(?:^|[^a-z])(?:n|nodes?|hosts?|restart|attempt|step)[-_.]?\Z", re.IGNORECASE
)
_PBS = re.compile(r"\.[oe][0-9]+\Z")  # train.o4711
_ATTEMPT = re.compile(r"attempt_([0-9]+)\Z")
_LOG_DIRECTORY = re.compile("log|torch", re.IGNORECASE)


def has_number(name: str, job_id: str, task_id: str = "") -> bool:
    """Say whether a name carries a job's number, with an array task's, as numbers of their own.

    >>> has_number("slurm-4711.out", "4711"), has_number("slurm-47110.out", "4711")
    (True, False)
    >>> has_number("x-4711_03.err", "4711", "3"), has_number("x-4711_31.err", "4711", "3")
    (True, False)
    """
    task = f"[^0-9a-zA-Z]0*{task_id}" if task_id else ""
    return re.search(rf"(?<![0-9])0*{job_id}{task}(?![0-9])", name) is not None


def find_numbered(places: Iterable[Path], job_id: str, task_id: str = "") -> list[Path]:
    """List the files of text in some directories whose names carry a job's number."""
    return [
        Path(entry.path)
        for place in places
        for entry in _entries(place)
        if has_number(entry.name, job_id, task_id)
        and _is_text(entry.name)
        and os.path.isfile(entry.path)
    ]


def _is_text(name: str) -> bool:
    return os.path.splitext(name)[1] in SUFFIXES or _PBS.search(name) is not None


def read_tasks(paths: Sequence[Path], *, restarts: int = 0) -> list[tuple[Path, int | None]]:
    """Give each file the number of its task, where the names tell it.

    They do where names differ in one number alone, which counts from 0 without a gap, and are
    not of a job's restarts.
    """
    alike: dict[tuple[Path, tuple[str, ...]], list[Path]] = defaultdict(list)
    for path in paths:
        alike[path.parent, tuple(_DIGITS.split(path.name)[::2])].append(path)
    tasks: dict[Path, int] = {}
    for (_, words), group in alike.items():
        tasks |= _tasks_of(words, group, restarts)
    for path in paths:
        if match := _SUBMITIT.match(path.name):
            tasks[path] = int(match["task"])
    return [(path, tasks.get(path)) for path in paths]


def _tasks_of(words: Sequence[str], paths: Sequence[Path], restarts: int) -> dict[Path, int]:
    rows = [[int(number) for number in _DIGITS.findall(path.name)] for path in paths]
    varying = [
        place for place, numbers in enumerate(zip(*rows, strict=True)) if len({*numbers}) > 1
    ]
    if len(varying) != 1 or _NO_TASK.search(words[varying[0]]):
        return {}
    numbers = [row[varying[0]] for row in rows]
    if sorted(numbers) != list(range(len(paths))) or (restarts and max(numbers) <= restarts):
        return {}
    return dict(zip(paths, numbers, strict=True))


def find_torchrun(places: Iterable[Path], job_id: str, task_id: str = "") -> list[Path]:
    """List the newest attempt's files of torchrun's log directories that carry a job's number.

    They are `<run>/attempt_<n>/<local rank>/stdout.log`; the run or the directory above it
    carries the number, below one of the places or a directory in them that is one of logs.
    """
    found = []
    for run in _torchrun_runs(places, job_id, task_id):
        attempts = [(int(m[1]), e) for e in _entries(run) if (m := _ATTEMPT.match(e.name))]
        if attempts:
            newest = Path(max(attempts, key=lambda attempt: attempt[0])[1].path)
            ranks = [rank for rank in _directories(newest) if rank.name.isdecimal()]
            files = [rank / name for rank in ranks for name in ("stdout.log", "stderr.log")]
            found += [file for file in files if os.path.isfile(file)]
    return found


def _torchrun_runs(places: Iterable[Path], job_id: str, task_id: str) -> Iterator[Path]:
    above = [directory for place in places for directory in (place, *_log_directories(place))]
    for directory in dict.fromkeys(above):
        for numbered in _directories(directory):
            if has_number(numbered.name, job_id, task_id):
                yield numbered
                yield from _directories(numbered)


def _log_directories(place: Path) -> Iterator[Path]:
    return (path for path in _directories(place) if _LOG_DIRECTORY.search(path.name))


def _directories(place: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(place) if os.path.isdir(entry.path)]


def _entries(place: Path) -> list[os.DirEntry[str]]:
    """List a directory by name; one that is not there or that we may not read has nothing."""
    try:
        return sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return []
