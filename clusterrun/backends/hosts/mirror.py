"""Copy what an agent writes on a host that does not share the run's home to the home.

The host asks what is wanted, and the home names files and how much of each it has; so neither
remembers what the other got. Checkpoints are never copied.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clusterrun.errors import ClusterrunError
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.rundir.create import write_config
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

RETRY_S: Final = 5.0  # until a full disk is tried again
DATA_BYTES: Final = 1 << 20  # of one part of a file
BATCH_BYTES: Final = 8 * DATA_BYTES
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RUN: Final = RunPaths(root=Path())

Files = dict[str, int]  # by path relative to the run directory


@lru_cache(maxsize=8192)
def _node_files(node: str, attempt: int) -> dict[str, bool]:
    """Return a node's files: True for one that grows, False for one that is sent whole.

    `news` needs this order: what points into a log, such as its side file, comes before it.
    """
    logs = (_RUN.log_errors, _RUN.log, _RUN.nccl_log, _RUN.rank_errors)
    growing = [*(of(attempt, node) for of in logs), _RUN.usage(node), _RUN.events(node)]
    whole = (_RUN.flight_dumps(attempt, node), _RUN.live_dumps(attempt, node), _RUN.status(attempt))
    return {str(path): path in growing for path in (*growing, *whole)}


@dataclass(kw_only=True)
class Receiver:
    """Writes what a host sends for its node; reports once that the disk is full."""

    root: Path
    node: str
    _retry_at: float = 0.0  # 0.0 if the disk has room
    _sent_at: Files = field(default_factory=dict)  # the home's disk may round times of change

    def wants(self) -> dict[str, Any] | None:
        """Return what `news` needs; None while the disk is full."""
        if time.monotonic() < self._retry_at:
            return None
        is_growing = self._is_growing_by_name()
        grows = {name: files.size_of(self.root / name) for name in is_growing if is_growing[name]}
        whole = [name for name in is_growing if not is_growing[name]]
        times = {name: self._sent_at.get(name) or _changed_ns(self.root / name) for name in whole}
        return {"grows": grows, "others": times}

    def take(self, name: str, at: int, data: bytes) -> None:
        """Write bytes from offset `at`, or a whole file of time `at`. Raises ClusterrunError."""
        is_growing, path = self._is_growing_by_name(), self.root / name
        if name not in is_growing:  # a host may write only its own files
            raise ClusterrunError(f"it sent {name!r}, which is not one of its own files")
        if time.monotonic() < self._retry_at:
            return  # the disk is full, and no file may get ahead of the log that it points into
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_growing[name]:
                _append(path, at, data)
            else:
                files.write_whole(path, data)
                os.utime(path, ns=(at, at))
                self._sent_at[name] = at
            self._retry_at = 0.0
        except OSError as error:
            if not self._retry_at:
                say_on_stderr(f"cannot write {path}: {error.strerror or error}; retrying")
            self._retry_at = time.monotonic() + RETRY_S

    def _is_growing_by_name(self) -> dict[str, bool]:
        attempts = RunPaths(root=self.root).attempts()
        return {path: grows for n in attempts for path, grows in _node_files(self.node, n).items()}


def _changed_ns(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _append(path: Path, at: int, data: bytes) -> None:
    """Append what the file lacks of a part at offset `at`; nothing if earlier bytes are missing."""
    with open(os.open(path, _APPEND, files.PRIVATE), "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(data)[size - at :] if at <= size else memoryview(b"")
        while rest:  # on a full disk, a write may take only a part
            rest = rest[file.write(rest) :]


def news(
    root: Path, grows: Files, others: Files, shifts: dict[str, int]
) -> Iterator[tuple[str, int, bytes]]:
    """Yield path, offset (or time of change) and bytes of what the home lacks, up to a batch.

    `grows` has the sizes at home, `others` the times of change. `shifts` keeps by how many bytes a
    file is longer at home: a crash here may lose the end of a file, and usage may begin anew.
    """
    # What points into a log is measured before the log and sent after it.
    sizes = {path: files.size_of(root / path) for path in grows}
    for path, known in others.items():
        changed = _changed_ns(root / path)
        if changed != known:
            with contextlib.suppress(OSError):
                yield path, changed, files.read_whole(root / path)
    room = BATCH_BYTES
    for path in reversed(grows):
        start = grows[path] - shifts.get(path, 0)  # in the file here
        if sizes[path] < start:  # it has shrunk: what it gets from now on is new
            shifts[path] = grows[path] - sizes[path]
        while start < sizes[path]:
            size = min(DATA_BYTES, sizes[path] - start, room)
            data = files.end_of(root / path, size, since=start, until=start + size)
            if not data:  # the batch is full, or the file can't be read
                return
            yield path, start + shifts.get(path, 0), data
            start, room = start + len(data), room - len(data)


def bundle(paths: RunPaths) -> dict[str, str]:
    """Return what a host needs for the newest attempt: texts by relative path."""
    wanted = (*paths.config_files, paths.attempt_record(paths.newest_attempt()))
    return {
        str(path.relative_to(paths.root)): path.read_text("utf-8", "surrogateescape")
        for path in filter(Path.is_file, wanted)
    }


def write_bundle(root: Path, texts: Mapping[str, str]) -> None:
    """Write what `bundle` returned. Raises OSError."""
    for name, text in texts.items():
        (root / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_config(root / name, text)
