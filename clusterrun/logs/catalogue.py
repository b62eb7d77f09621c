"""Where the log files of a job are: of a run of ours here, of a foreign job in `foreign`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clusterrun.logs.files import Kind, LogFile, find_files
from clusterrun.paths import RunPaths

BATCH = "batch"


class Catalogue(Protocol):
    """What a reader must know of a job to find its logs; asked again and again while it runs."""

    def newest_attempt(self) -> int:
        """Count the attempts that were started; 0 when none was."""

    def files(self, attempt: int) -> list[LogFile]:
        """List the log files that an attempt has by now, and their side files."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The logs of a run, or of some of its nodes; or, `is_batch`, what its batch script printed."""

    paths: RunPaths
    nodes: frozenset[str] | None = None
    is_batch: bool = False

    def newest_attempt(self) -> int:
        """Count the attempts that were started; the batch script's output is one for all."""
        return 1 if self.is_batch else self.paths.newest_attempt()

    def files(self, attempt: int) -> list[LogFile]:
        """List the logs and side files of an attempt's nodes."""
        if self.is_batch:
            path = self.paths.batch_output
            return [LogFile(node=BATCH, path=path, kind=Kind.PLAIN)] if path.exists() else []
        return find_files(self.paths, attempt, self.nodes)
