"""Copy what an agent writes on a host that does not share the run's home to the home.

The host asks what is wanted, and the home names files and how much of each it has; so neither
remembers what the other got. Checkpoints are never copied.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clusterrun.backends.hosts.start import DATA_BYTES, Frame
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

RETRY_S: Final = 5.0  # until a full disk is tried again
BATCH_BYTES: Final = 8 * DATA_BYTES
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RUN: Final = RunPaths(root=Path())

Files = dict[str, int]  # by path relative to the run directory


class RefusedError(ClusterrunError):
    """A host sent something that is not its own."""


@lru_cache(maxsize=8192)
def _grows(node: str, attempt: int) -> dict[str, bool]:
    """Return what a node writes, and whether it only grows; what points into a log is before it."""
    logs = (_RUN.log_errors, _RUN.log, _RUN.nccl_log, _RUN.rank_errors)
    grows = [*(of(attempt, node) for of in logs), _RUN.usage(node), _RUN.events(node)]
    whole = [*(of(attempt, node) for of in (_RUN.flight_dumps, _RUN.live_dumps))]
    found = ((True, grows), (False, [*whole, _RUN.status(attempt)]))
    return {str(path): is_growing for is_growing, paths in found for path in paths}


@dataclass(kw_only=True)
class Receiver:
    """Write what a host sends for its node; report to `say`, once, that the disk is full."""

    root: Path
    node: str
    say: Callable[[str], None]
    _retry_at: float = 0.0
    _is_full: bool = False
    _received: Files = field(default_factory=dict)  # the home's disk may round times of change

    def wants(self) -> dict[str, Any] | None:
        """Return what `news` needs; None while the disk is full."""
        if time.monotonic() < self._retry_at:
            return None
        known, root = self._known(), self.root
        grows = {path: files.size_of(root / path) for path in known if known[path]}
        others = {
            path: self._received.get(path) or _changed(root / path)
            for path in known
            if not known[path]
        }
        return {"grows": grows, "others": others}

    def take(self, frame: Frame) -> None:
        """Write a part of a file. Raises RefusedError for one that is not the host's own."""
        name, at = frame.fields["path"], int(frame.fields["at"])
        known, path = self._known(), self.root / name
        if name not in known:
            raise RefusedError(f"a host sent {name!r}, which is not its own")
        if time.monotonic() < self._retry_at:
            return  # nothing may point into a log that is behind
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if known[name]:
                _append(path, at, frame.data)
            else:
                files.write_whole(path, frame.data)
                os.utime(path, ns=(at, at))
                self._received[name] = at
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                self.say(f"cannot write {path}: {error.strerror or error}; retrying")
            self._is_full, self._retry_at = True, time.monotonic() + RETRY_S

    def _known(self) -> dict[str, bool]:
        attempts = RunPaths(root=self.root).attempts()
        return {path: grows for n in attempts for path, grows in _grows(self.node, n).items()}


def _changed(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _append(path: Path, at: int, data: bytes) -> None:
    """Append what is new in a part that begins at a place; nothing if something is missing."""
    with open(os.open(path, _APPEND, files.PRIVATE), "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(data)[size - at :] if at <= size else memoryview(b"")
        while rest:
            rest = rest[file.write(rest) :]


def news(
    root: Path, grows: Files, others: Files, shifts: dict[str, int]
) -> Iterator[tuple[str, int, bytes]]:
    """Yield path, place and bytes of what the home lacks, up to a batch; a log is last.

    `grows` has the sizes at home, `others` the times of change. `shifts` remembers how much longer
    a file is there: a crash of a host takes the end of its files, and usage begins anew at times.
    """
    # What points into a log is looked at before it and sent after it.
    sizes = {path: files.size_of(root / path) for path in grows}
    for path, known in others.items():
        changed = _changed(root / path)
        if changed != known:
            with contextlib.suppress(OSError):
                yield path, changed, files.read_whole(root / path)
    room = BATCH_BYTES
    for path in reversed(grows):
        at = grows[path] - shifts.get(path, 0)
        if sizes[path] < at:
            shifts[path] = grows[path] - sizes[path]
        while at < sizes[path]:
            data = _read(root / path, at, min(DATA_BYTES, sizes[path] - at, room))
            if not data:
                return
            yield path, at + shifts.get(path, 0), data
            at, room = at + len(data), room - len(data)


def _read(path: Path, at: int, size: int) -> bytes:
    with contextlib.suppress(OSError), files.open_regular(path) as file:
        file.seek(at)
        return file.read(size)
    return b""


def bundle(paths: RunPaths) -> list[tuple[str, str, int]]:
    """Return what a host needs for the newest attempt: relative path, text and mode."""
    wanted = (*paths.config_files, paths.link_secret(paths.newest_attempt()))
    found = []
    for path in filter(Path.is_file, wanted):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        found.append((str(path.relative_to(paths.root)), text, stat.S_IMODE(path.stat().st_mode)))
    return found


def write_bundle(root: Path, found: Iterable[tuple[str, str, int]]) -> None:
    """Write what `bundle` returned; an error leaves no new run directory."""
    is_new = not root.exists()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text, mode in found:
            (root / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_whole(root / name, text, mode=mode)
    except BaseException:
        if is_new:
            shutil.rmtree(root, ignore_errors=True)
        raise
