"""Find the log files of a run and read stretches of them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.world import ranks_by_node
from clusterrun.shared.descriptors import raise_descriptor_limit
from clusterrun.shared.hostlist import natural_key

BLOCK_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024  # reached only in damaged files: agents cut lines far earlier
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # to open a FIFO may block
_SPARE_DESCRIPTORS = 64  # for everything else that this process opens


class FileKind(Enum):
    """The format of a file's lines: PLAIN lines have no stamp, nor a rank."""

    LOG = "log"
    ERRORS = "errors"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """A file of one node's log lines; `ranks` is None if unknown, `log` is an ERRORS file's log."""

    node: str
    path: Path
    kind: FileKind = FileKind.LOG
    ranks: range | None = None
    log: Path | None = None


def find_files(paths: RunPaths, attempt: int, nodes: frozenset[str] | None = None) -> list[LogFile]:
    """List the logs of an attempt, or of some of its nodes, followed by their side files.

    Both are sorted by node, node2 before node10.
    """
    directory = paths.log(attempt, "any").parent
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    ranks = ranks_by_node(paths, attempt)
    parts = sorted(map(os.path.splitext, names), key=lambda part: natural_key(part[0]))
    return [
        LogFile(
            node=node,
            path=directory / f"{node}{suffix}",
            kind=kind,
            ranks=ranks.get(node),
            log=paths.log(attempt, node) if kind is FileKind.ERRORS else None,
        )
        for kind, suffix in ((FileKind.LOG, ".log"), (FileKind.ERRORS, ".err"))
        for node, found in parts
        if found == suffix and (nodes is None or node in nodes)
    ]


def stat_file(path: Path, *, fresh: bool = False) -> os.stat_result | None:
    """Return the stat of a file; None if it does not exist.

    `fresh` opens it first, since an NFS client may answer stat from its cache for seconds.
    """
    try:
        if not fresh:
            return os.stat(path)
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    found = stat_file(path)
    return found.st_size if found else 0


class Catalogue(NamedTuple):
    """The attempts of a job, and the files that one of them has now."""

    attempts: Callable[[], list[int]]
    files: Callable[[int], list[LogFile]]


class OpenFiles:
    """Reads from many files, and keeps as many open as the descriptor limit allows.

    On a network file system each open asks the server. The soft limit is raised while this object
    is in use; files beyond it are opened for each read.
    """

    def __init__(self, count: int) -> None:
        self._descriptors: dict[Path, int] = {}
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = raise_descriptor_limit(count + _SPARE_DESCRIPTORS) - _SPARE_DESCRIPTORS

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in list(self._descriptors):
            self.close(path)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Read up to `size` bytes; b"" if the file does not exist or is shorter than `offset`.

        Raises ClusterrunError for a file that can't be read.
        """
        try:
            descriptor = self._descriptors.get(path)
            if descriptor is None:  # 0 is valid
                descriptor = self._descriptors[path] = os.open(path, _READ)
            found = os.pread(descriptor, size, offset)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            if len(self._descriptors) > self._room:
                self.close(path)
        return found

    def close(self, path: Path) -> None:
        """Close a file that is no longer needed."""
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def find_line_end(path: Path, start: int, end: int) -> int:
    """Return where the last whole line between two offsets ends; `start` if there is none.

    A stretch that is too long for a line is treated as whole, so that a reader makes progress.
    """
    position = end
    with OpenFiles(1) as files:
        while position > start:
            size = min(BLOCK_BYTES, position - start)
            newline = files.read(path, position - size, size).rfind(b"\n")
            if newline >= 0:
                return position - size + newline + 1
            position -= size
            if end - position > MAX_LINE_BYTES:
                return end
    return start


def _unreadable(path: Path, error: OSError) -> ClusterrunError:
    return ClusterrunError(f"cannot read {path}", cause=error.strerror or str(error))
