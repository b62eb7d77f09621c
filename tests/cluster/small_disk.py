"""A small file system for run directories, which can be filled and given room again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import run

CHUNK = bytes(1 << 20)


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    """A mounted tmpfs, which all nodes see: they share everything but the network."""

    root: Path

    @property
    def _filler(self) -> Path:
        return self.root / ".filler"

    def fill(self) -> None:
        """Take all space that is left, to the last byte."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            size = len(CHUNK)
            while size:
                try:
                    os.write(descriptor, CHUNK[:size])
                except OSError:  # no space: smaller pieces, down to one byte
                    size //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(root: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Mount one on a directory that is made for it; needs root."""
    root.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(root)])
    try:
        yield SmallDisk(root=root)
    finally:
        run(["umount", "--lazy", str(root)])
