"""Where log files are; readers ask repeatedly while a job runs."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterrun.backends.slurm.foreign import ForeignPart
from clusterrun.logformat.lines import Stream
from clusterrun.logs.files import FileKind, LogFile, find_files, stat_file
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState

BATCH = "batch"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The stamped logs of a run, or of some of its nodes."""

    paths: RunPaths
    nodes: frozenset[str] | None = None

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts that were started, in order."""
        return self.paths.attempts()

    def files(self, attempt: int) -> list[LogFile]:
        """List the logs that an attempt has now, and their side files."""
        return find_files(self.paths, attempt, self.nodes)


@dataclass(frozen=True, kw_only=True)
class PlainFiles:
    """Files without stamps, all of one attempt: the output of a batch script or of another tool."""

    candidates: Callable[[], Iterable[LogFile]]

    def attempts(self) -> list[int]:
        """Return 1."""
        return [1]

    def files(self, attempt: int) -> list[LogFile]:
        """List the regular files that exist now."""
        stats = ((file, stat_file(file.path)) for file in self.candidates())
        return [file for file, found in stats if found and stat.S_ISREG(found.st_mode)]


Catalogue = RunFiles | PlainFiles


def files_of_parts(parts: Iterable[ForeignPart]) -> list[LogFile]:
    """List the files that Slurm writes a job's output to, without duplicates.

    A job that has not started has none: a file with its name belongs to an earlier job.
    """
    files: dict[str, LogFile] = {}
    for part in parts:
        if part.job.state in (JobState.PENDING, JobState.CONFIGURING) and not part.job.restarts:
            continue
        for name, node, stream in (
            (part.stdout, part.label, Stream.OUT),
            (part.stderr, f"{part.label}.err", Stream.ERR),
        ):
            if name:
                file = LogFile(node=node, path=Path(name), kind=FileKind.PLAIN, stream=stream)
                files.setdefault(name, file)
    return list(files.values())
