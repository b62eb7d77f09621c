"""Bring the ranks' error files from the spool to the run directory, each whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from clusterrun.files import write_whole


class ErrorFiles:
    """Those that still have to be copied."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._waiting: dict[int, Path] = {}
        self._copied: set[int] = set()

    def found(self, files: dict[int, Path]) -> None:
        """Take note of the files that are there by now."""
        self._waiting.update((r, path) for r, path in files.items() if r not in self._copied)

    def copy(self) -> None:
        """Copy what waits; what can't be copied now waits on."""
        for rank, path in list(self._waiting.items()):
            with contextlib.suppress(OSError):
                target = self._path_of(rank)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(target, path.read_bytes())
                self._copied.add(rank)
                del self._waiting[rank]
