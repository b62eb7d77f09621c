"""Copy what an agent writes on a host that does not share the run's home to the home.

The home's few orders to the agents travel back the same way. Checkpoints are never copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterrun.backends.hosts.start import DATA_BYTES, Frame
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

HOME = ""  # the node whose files travel from the home to the hosts
POLL_S = 0.25
LIST_S = 1.0
_DRAIN_BYTES = 16 << 20  # between two looks
_KEPT_BYTES = 64 << 10  # of what a full disk did not take
_MOST = 1 << 62
_ATTEMPT = re.compile(r"[a-z]+/a?([1-9][0-9]{0,5})/")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RUN = RunPaths(root=Path())


class RefusedError(ClusterrunError):
    """A host sent something that is not its own."""


class _Way(Enum):
    GROWS = "grows"  # only appended to
    WHOLE = "whole"  # replaced
    FIRST = "first"  # the first writer decides
    HEADS = "heads"  # the same, and only the head's host may write it


@lru_cache(maxsize=8192)
def _ways(node: str, attempt: int) -> dict[str, _Way]:
    """Return what a node writes.

    Not head.pid: on the home's host, another process may have that pid.
    """
    heads, first, whole, grows = [], [_RUN.status(attempt)], [_RUN.request(attempt)], []
    if node != HOME:
        first.append(_RUN.outcome(attempt))
        heads = [f(attempt) for f in (_RUN.world, _RUN.resumed, _RUN.stacks, _RUN.request)]
        whole = [f(attempt, node) for f in (_RUN.flight_dumps, _RUN.live_dumps)]
        logs = (_RUN.log, _RUN.log_errors, _RUN.nccl_log, _RUN.rank_errors)
        grows = [_RUN.events(node), _RUN.usage(node), *(f(attempt, node) for f in logs)]
    found = zip(_Way, (grows, whole, first, heads), strict=True)
    return {str(path): way for way, paths in found for path in paths}


def _all_ways(root: Path, node: str) -> Iterator[tuple[str, _Way]]:
    for attempt in RunPaths(root=root).attempts():
        yield from _ways(node, attempt).items()


def _leader(path: str) -> str:
    """Return the log that a side file points into; for any other file, its own path."""
    is_side = path.startswith("logs/") and path.endswith(".err")
    return f"{path[:-4]}.log" if is_side else path


def sizes(root: Path, node: str) -> dict[str, int]:
    """Return how much the home has of each growing file of a node."""
    found = (path for path, way in _all_ways(root, node) if way is _Way.GROWS)
    return {path: size for path in found if (size := files.size_of(root / path))}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a file; `size` is that of a whole file, else 0."""

    path: str
    at: int
    data: bytes
    size: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the message that carries the data."""
        return {"path": self.path, "at": self.at, "of": self.size}

    @classmethod
    def of(cls, frame: Frame) -> Chunk:
        """Read a message. Raises RefusedError."""
        path, *rest = (frame.fields.get(name) for name in ("path", "at", "of"))
        at, size = (n if type(n) is int and n < _MOST else -1 for n in rest)
        if not isinstance(path, str) or min(at, size) < 0:
            raise RefusedError("a host sent a damaged message")
        return cls(path=path, at=at, data=frame.data, size=size)


@dataclass(kw_only=True)
class _Source:
    """A file to send from `sent` to `until`; what grows is `shift` bytes further at home."""

    path: str
    file: Path
    grows: bool
    sent: int
    until: int = 0
    shift: int = 0
    version: tuple[int, int] | None = None  # inode, and the mtime of a file that is replaced

    def look(self) -> None:
        """Notice that the file has grown or was replaced."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.file)
            version, size = self._version(found), found.st_size
            if self.version and (version != self.version or size < self.sent):
                self.shift += self.sent if self.grows else 0  # the home keeps what it has
                self.sent = 0
            elif size < self.sent:  # a crash of the host has taken its end
                self.shift, self.sent = self.sent - size, size
            self.version, self.until = version, size

    def take(self, limit: int) -> Chunk | None:
        """Return the next part; None if there is none, or if the file can't be read now."""
        with contextlib.suppress(OSError):
            if self.sent < self.until:
                with open(os.open(self.file, _READ), "rb", buffering=0) as file:
                    return self._read(file.fileno(), limit)
        return None

    def _version(self, found: os.stat_result) -> tuple[int, int]:
        return found.st_ino, 0 if self.grows else found.st_mtime_ns

    def _read(self, file: int, limit: int) -> Chunk | None:
        if self._version(os.fstat(file)) != self.version:
            return None  # replaced since the last look
        data, at = os.pread(file, min(limit, self.until - self.sent), self.sent), self.sent
        self.sent += len(data)
        size = 0 if self.grows else self.until
        return Chunk(path=self.path, at=at + self.shift, data=data, size=size) if data else None


class Sender:
    """Find what is new in the files of a node; for one thread. `known`: see `sizes`."""

    def __init__(self, root: Path, node: str, known: Mapping[str, int]) -> None:
        self._root, self._node, self._known = root, node, known
        self._sources: dict[str, _Source] = {}
        self._turns: deque[_Source] = deque()
        self._needs: dict[str, int] = {}  # how much of its log a file may point into
        self._listed = -LIST_S

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """Yield at most `limit` bytes of what is new, of each file in turn."""
        self._look()
        idle = 0
        while idle < len(self._turns) and limit > 0:
            source = self._turns[0]
            self._turns.rotate(-1)
            is_early = self._log_of(source).sent < self._needs.get(source.path, 0)
            chunk = None if is_early else source.take(min(limit, DATA_BYTES))
            idle = 0 if chunk else idle + 1
            if chunk:
                limit -= len(chunk.data)
                yield chunk

    def drain(self, deadline: float) -> Iterator[Chunk]:
        """Yield all that exists, until a deadline of time.monotonic()."""
        found = True
        while found and time.monotonic() < deadline:
            self._listed, found = -LIST_S, False
            for chunk in self.chunks(_DRAIN_BYTES):
                found = True
                yield chunk

    def rewind(self, known: Mapping[str, int]) -> None:
        """Send again what the other end asks for (`Receiver.again`)."""
        for path in known.keys() & self._sources.keys():
            source = self._sources[path]
            source.sent = max(0, known[path] - source.shift) if source.grows else 0

    def _log_of(self, source: _Source) -> _Source:
        return self._sources[_leader(source.path)]

    def _look(self) -> None:
        """Look at what points into a log before the log: that has all of it then."""
        if time.monotonic() - self._listed >= LIST_S:
            self._listed = time.monotonic()
            for path, way in _all_ways(self._root, self._node):
                if path not in self._sources:
                    grows, known = way is _Way.GROWS, self._known.get(path, 0)
                    source = _Source(path=path, file=self._root / path, grows=grows, sent=known)
                    self._sources[path] = source
                    self._turns.append(source)
        for source in self._sources.values():
            if self._log_of(source) is not source and source.sent >= source.until:
                source.look()
                self._needs[source.path] = files.size_of(self._log_of(source).file)
        for source in self._sources.values():
            if self._log_of(source) is source:
                source.look()


@dataclass(kw_only=True)
class Receiver:
    """Write what a host sends for its nodes; report to `say`, once, that the disk is full.

    `leads` contains the attempts whose head is on that host.
    """

    root: Path
    nodes: Collection[str]
    say: Callable[[str], None]
    leads: Collection[int] = ()
    _lags: dict[str, Chunk] = field(default_factory=dict)  # the beginning of what is missing
    _is_told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, chunk: Chunk) -> None:
        """Write a part. Raises RefusedError for a file that is not the host's own."""
        number, way = self._way(chunk.path)
        is_known = not number or RunPaths(root=self.root).attempt(number).is_dir()
        if not is_known or (way is _Way.HEADS and number not in self.leads):
            return
        with self._lock:
            if self._write(chunk):
                self._lags.pop(chunk.path, None)
            else:
                kept = dataclasses.replace(chunk, data=chunk.data[:_KEPT_BYTES])
                self._lags.setdefault(chunk.path, kept)

    def again(self) -> dict[str, int] | None:
        """Return to what the sender must rewind; None while the disk is full. Ask every second."""
        with self._lock:
            full = {path for path, chunk in self._lags.items() if self._write(chunk) is None}
            self._is_told = bool(full)
            asked = [path for path in self._lags if not {path, _leader(path)} & full]
            for path in asked:
                del self._lags[path]
            return {p: files.size_of(self.root / p) for p in asked} if asked or not full else None

    def close(self) -> None:
        """Remove what came only in part."""
        for path, _ in (each for node in self.nodes for each in _all_ways(self.root, node)):
            with contextlib.suppress(OSError):
                _part(self.root / path).unlink()

    def _way(self, path: str) -> tuple[int, _Way]:
        number = int(match[1]) if (match := _ATTEMPT.match(path)) else 0
        way = next((w for node in self.nodes if (w := _ways(node, number).get(path))), None)
        if way is None or not (number or path.startswith(("events/", "usage/"))):
            raise RefusedError(f"a host sent {path!r}, which is not its own")
        return number, way

    def _write(self, chunk: Chunk) -> bool | None:
        """Write a part; return False if what is before it is missing, None for a full disk."""
        if chunk.path != _leader(chunk.path) in self._lags:
            return False
        path = self.root / chunk.path
        try:
            return _write(self.root, path, chunk, self._way(chunk.path)[1])
        except OSError as error:
            if not self._is_told:
                self.say(f"cannot write {path}: {error.strerror or error}; retrying")
            self._is_told = True
            return None


def _write(root: Path, path: Path, chunk: Chunk, way: _Way) -> bool:
    if path.parent.resolve() != root.resolve() / path.parent.relative_to(root):
        raise OSError(errno.ELOOP, "its directory is a symbolic link")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if way is _Way.GROWS:
        return _append(path, chunk)
    part = _part(path)
    if not chunk.at:
        part.unlink(missing_ok=True)
    is_written = _append(part, chunk)
    if is_written and chunk.at + len(chunk.data) >= chunk.size:
        with contextlib.suppress(FileExistsError):
            (os.rename if way is _Way.WHOLE else os.link)(part, path)
        part.unlink(missing_ok=True)
    return is_written


def _append(path: Path, chunk: Chunk) -> bool:
    with open(os.open(path, _APPEND, files.PRIVATE), "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(chunk.data)[max(0, size - chunk.at) :]
        while chunk.at <= size and data:
            data = data[file.write(data) :]
    return chunk.at <= size


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def bundle(paths: RunPaths) -> list[tuple[str, str, int]]:
    """Return what a host needs for the newest attempt: relative path, text and mode."""
    secret = paths.link_secret(paths.newest_attempt())
    found = []
    for path in filter(Path.is_file, (*paths.config_files, secret)):
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
