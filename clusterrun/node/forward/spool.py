"""The node-local directory in which the ranks write output, events and errors for the agent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clusterrun.logformat.lines import LINE_BYTES
from clusterrun.node.base.processes import is_running
from clusterrun.rundir.paths import FileIn, FileOf
from clusterrun.shared.files import parse_object

NCCL, FLIGHT = "nccl", "flight"  # prefixes of file names
KEPT_S = 7 * 86400
BLOCK_BYTES = 1 << 17  # read and stamped together: 3 MiB of memory if each line is empty
HELD_S = 1.0  # how long the beginning of a line waits for its end
GIVE_BACK_BYTES = 1 << 22
_NAME = r"clusterrun-(?P<space>[0-9a-f]{8})-(?P<pid>\d+)-.+-[^-]+\Z"
_KEPT = "clusterrun-kept-"
_OUTPUT = re.compile(r"rank_(\d+)\.(out|err)\Z")
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


class Output(NamedTuple):
    """A file that grows; `rank` is `-` for the launcher, `stream` is o, e or l."""

    path: Path
    rank: str
    stream: str


@dataclass(frozen=True, kw_only=True)
class Spool:
    """The paths of everything in the spool."""

    root: Path

    launcher_output = FileIn("launcher.out")  # the launcher's own stdout and stderr
    failures = FileIn("failures.json")  # the launcher's list of the ranks that failed
    launcher_dir = FileIn("launcher")  # the launcher's own logs
    control = FileIn("control")  # the page that agent and ranks share (shared/control_page.py)

    events = FileOf[int]("rank_{}.events")  # where a rank writes its events
    stacks = FileOf[int]("rank_{}.stacks")  # where it writes its stacks
    pipe = FileOf[int]("rank_{}.ask")  # where it waits to be asked for its flight recorder
    dump = FileOf[int](FLIGHT + "_rank_{}")  # where it, or torch, writes the recorder's dump

    def outputs(self) -> list[Output]:
        """List the output files that exist now."""
        names, launcher = self._names(), self.launcher_output
        found = [*_outputs(self.root, names)]
        if launcher.name in names:
            found.append(Output(path=launcher, rank="-", stream="l"))
        return found

    def ranks(self) -> list[int]:
        """List the ranks that have written events."""
        return [rank for rank, _ in _of_ranks(self._names(), "events")]

    def error_files(self) -> list[Path]:
        """List the error files that ranks have written."""
        return list(self._by_rank("error.json").values())

    def named(self, prefix: str) -> list[Path]:
        """List the files whose names begin with `prefix`: those that NCCL wrote, or the dumps."""
        return [self.root / name for name in self._names() if name.startswith(prefix)]

    def _by_rank(self, kind: str) -> dict[int, Path]:
        return {rank: self.root / name for rank, name in _of_ranks(self._names(), kind)}

    def _names(self) -> tuple[str, ...]:
        with contextlib.suppress(OSError):  # gone, or no descriptor is left: later calls try again
            return tuple(sorted(os.listdir(self.root)))
        return ()

    def unlock(self) -> list[str]:
        """Remove the locks of ranks that died while compiling; return a line about each."""
        lines = []
        for rank, note in self._by_rank("lock").items():
            with contextlib.suppress(OSError):
                lock = Path(os.fsdecode(note.read_bytes()))  # which the rank held
                lock.unlink()
                lines.append(f"rank {rank} died while compiling: its lock {lock} was removed")
        return lines

    def remove(self) -> None:
        """Remove the spool with everything in it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def keep(self) -> Path:
        """Keep the spool for a week, under a name that later agents do not clear as abandoned."""
        kept = self.root.with_name(_KEPT + self.root.name.removeprefix("clusterrun-"))
        with contextlib.suppress(OSError):
            return self.root.rename(kept)
        return self.root


# The spool is listed many times a second, and its files seldom change: match the names once.
@functools.lru_cache(maxsize=2)
def _outputs(root: Path, names: tuple[str, ...]) -> tuple[Output, ...]:
    matches = ((name, _OUTPUT.match(name)) for name in names)
    return tuple(Output(root / name, match[1], match[2][0]) for name, match in matches if match)


@functools.lru_cache(maxsize=8)
def _of_ranks(names: tuple[str, ...], kind: str) -> tuple[tuple[int, str], ...]:
    """Return the ranks that have a file of this kind, and the file's name."""
    matches = ((name, re.match(rf"rank_(\d+)\.{kind}\Z", name)) for name in names)
    return tuple((int(match[1]), name) for name, match in matches if match)


def create_spool(job_id: str, attempt: int, node_rank: int) -> Spool:
    """Make a spool that only this user can read; remove the spools of killed agents."""
    base = Path(tempfile.gettempdir())
    _clear_abandoned(base)
    prefix = f"clusterrun-{_pid_space()}-{os.getpid()}-{job_id}.{attempt}.{node_rank}-"
    return Spool(root=Path(tempfile.mkdtemp(prefix=prefix, dir=base)))


def _clear_abandoned(base: Path) -> None:
    """Remove this user's spools whose agent is gone, and those that were kept for KEPT_S."""
    own_pid_space = _pid_space()
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            is_spool = entry.name.startswith("clusterrun-") and entry.is_dir(follow_symlinks=False)
            if not is_spool or entry.stat().st_uid != os.getuid():
                continue
            spool, match = Spool(root=Path(entry.path)), re.match(_NAME, entry.name)
            if match and match["space"] == own_pid_space and not is_running(int(match["pid"])):
                spool.unlock()
                spool.remove()
            elif entry.name.startswith(_KEPT) and time.time() - entry.stat().st_mtime > KEPT_S:
                spool.remove()


def _pid_space() -> str:
    """Return an id of this boot's pid namespace: nodes may share TMPDIR, and containers /tmp."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name = f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{zlib.crc32(name.encode()):08x}"


class EventReader:
    """Read a file of events as it grows, by whole lines; each event has a time and a type."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events added since the last call; skip other lines."""
        try:
            if os.stat(self._path).st_size == self._offset:
                return
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if event := parse_object(line):
                yield {**event, "ts": _time(event.get("ts")), "type": str(event.get("type"))}


def _time(value: object) -> float:
    """Return an event's time; now if it is not a number."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, (int, float)) and math.isfinite(float(value)):
            return float(value)
    return time.time()


class Piece(NamedTuple):
    """Whole lines with their newlines; if `is_cut`, the beginning of one line, without newline."""

    text: bytes
    is_cut: bool


class Loss(NamedTuple):
    """A number of bytes that were not forwarded, and why."""

    size: int
    reason: str


class SpoolReader:
    """Read a growing output; never truncate it, which could lose what its rank is writing."""

    def __init__(self, output: Output, since_us: int) -> None:
        self.rank, self.stream = output.rank, output.stream
        self.size = self.position = self.mtime_us = 0
        self.read_until_us = since_us  # unread bytes were written after that
        self.lost, self.recorded_us = Loss(0, ""), 0  # still to record; time of the last record
        self._held: tuple[int, int, float] | None = None  # a line: position, file size, since when
        self._freed_until = 0  # the byte up to which the space of the file was freed
        self._can_give_back = True  # until the file system refuses to free space
        self._descriptor = os.open(output.path, os.O_RDWR | os.O_CLOEXEC)  # `give_back` needs RDWR

    @property
    def unread(self) -> int:
        """How many bytes wait in the file."""
        return self.size - self.position

    def update(self) -> None:
        """Update the file's size and mtime."""
        found = os.fstat(self._descriptor)
        if found.st_size < self.position:  # the script truncated its own output
            self.position = self._freed_until = 0
        self.size, self.mtime_us = found.st_size, found.st_mtime_ns // 1000

    def is_due(self, now: float, *, is_last: bool) -> bool:
        """Return whether there is more to forward than the beginning of an unfinished line."""
        if not self.unread or self._held is None or is_last:
            return bool(self.unread)
        position, size, since = self._held
        return (position, size) != (self.position, self.size) or now - since >= HELD_S

    def read(self, now: float, *, is_last: bool) -> list[Piece]:
        """Return the next lines; `now` in seconds of the monotonic clock.

        Hold the beginning of an unfinished line for HELD_S, or return it if `is_last`.
        """
        data = os.pread(self._descriptor, min(BLOCK_BYTES, self.unread), self.position)
        is_end = len(data) == self.unread
        held_at, _, since = self._held or (-1, 0, now)  # -1: nothing is held
        held_since = since if held_at == self.position else now
        pieces = split_pieces(data, with_rest=is_end and (is_last or now - held_since >= HELD_S))
        taken = sum(len(piece.text) for piece in pieces)
        if is_last and is_end and taken < len(data):  # the file ends within a character
            pieces.append(Piece(data[taken:], is_cut=True))
            taken = len(data)
        self.position += taken
        is_held = is_end and taken < len(data)
        self._held = (self.position, self.size, now if taken else held_since) if is_held else None
        return pieces

    def drop(self, count: int) -> int:
        """Skip `count` unread bytes, and more up to a near next line; return how many bytes."""
        start, end = self.position, min(self.position + count, self.size)
        if end < self.size:
            end += _next_start(os.pread(self._descriptor, LINE_BYTES, end))
        end = min(end, self.size)
        self.position, self._held = end, None
        self.give_back()
        return end - start

    def give_back(self) -> None:
        """Free the space of forwarded bytes, if the file system can; the file keeps its size."""
        start, end = self._freed_until, self.position // _PAGE_BYTES * _PAGE_BYTES
        if self._can_give_back and end - start >= GIVE_BACK_BYTES:
            mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
            offset, length = map(ctypes.c_long, (start, end - start))
            self._can_give_back = _LIBC.fallocate(self._descriptor, mode, offset, length) == 0
            self._freed_until = end

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def split_pieces(data: bytes, *, with_rest: bool = False) -> list[Piece]:
    """Split the bytes of one stream, in order, into blocks of whole lines and cut long lines.

    Leave out an unfinished last line of up to LINE_BYTES; `with_rest` takes its whole characters.
    """
    pieces: list[Piece] = []
    start = 0
    while (end := _line_end(data, start)) > start:
        piece = Piece(data[start:end], is_cut=data[end - 1 : end] != b"\n")
        if pieces and not (piece.is_cut or pieces[-1].is_cut):
            piece = Piece(pieces.pop().text + piece.text, is_cut=False)  # one search and stamp
        pieces.append(piece)
        start = end
    rest = data[start : whole_characters(data, len(data))] if with_rest else b""
    return [*pieces, Piece(rest, is_cut=True)] if rest else pieces


def _line_end(data: bytes, start: int) -> int:
    """Return the end of the last line within LINE_BYTES, where to cut a longer one, or `start`."""
    if (newline := data.rfind(b"\n", start, start + LINE_BYTES + 1)) >= 0:
        return newline + 1
    return start if len(data) - start <= LINE_BYTES else whole_characters(data, start + LINE_BYTES)


def whole_characters(data: bytes, end: int) -> int:
    """Return the last offset up to `end` that splits no UTF-8 character."""
    for back in range(1, min(4, end + 1)):
        if (byte := data[end - back]) & 0xC0 != 0x80:  # a first byte: it shows the length
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return end - back if length > back else end
    return end


def _next_start(near: bytes) -> int:
    """Return the offset of the next line, else of the next whole UTF-8 character."""
    if (newline := near.find(b"\n")) >= 0:
        return newline + 1
    return next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)
