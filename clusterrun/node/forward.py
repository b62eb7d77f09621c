"""Forward what ranks and launcher wrote into the spool to the run directory, each line stamped.

A thread of its own does it, so that a slow or full disk stops neither the ranks, which write to
local files, nor the agent, which talks to the others over TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterrun.node.spool import Output, Spool

POLL_S = 0.1
CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 16  # a longer line is cut
HELD_S = 1.0  # how long the beginning of a line waits for its end


class Stamper:
    """Turn the bytes of one stream into stamped lines.

    A line that is cut, because it is too long or its end is not in sight, carries its stream in
    upper case: the next line of that rank and stream continues it.
    """

    def __init__(self, rank: str, stream: str) -> None:
        self._whole = f" {rank} {stream} ".encode()
        self._cut = f" {rank} {stream.upper()} ".encode()
        self._held = b""
        self._held_since = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Take the next bytes, and return the lines that are complete; `now` in epoch seconds."""
        lines = (self._held + data).split(b"\n")
        rest = lines.pop()
        stamp = _stamp(now)
        out = [part for line in lines for part in self._pieces(stamp, line)]
        while len(rest) > LINE_BYTES:
            piece, rest = _cut_text(rest)
            out += [stamp, self._cut, piece, b"\n"]
        if lines or not self._held:
            self._held_since = now
        self._held = rest
        return b"".join(out)

    def _pieces(self, stamp: bytes, line: bytes) -> list[bytes]:
        out = []
        while len(line) > LINE_BYTES:
            piece, line = _cut_text(line)
            out += [stamp, self._cut, piece, b"\n"]
        return [*out, stamp, self._whole, line, b"\n"]

    def flush(self, now: float, *, is_last: bool = False) -> bytes:
        """Return the beginning of a line that has waited long enough for its end."""
        if not self._held or not (is_last or now - self._held_since >= HELD_S):
            return b""
        held, self._held = self._held, b""
        return _stamp(now) + self._cut + held + b"\n"


def _stamp(now: float) -> bytes:
    return b"%d" % int(now * 1_000_000)


def _cut_text(line: bytes) -> tuple[bytes, bytes]:
    """Cut where no UTF-8 character is split, if the text is UTF-8 at all."""
    end = LINE_BYTES
    while end > LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end], line[end:]


class AppendedFile:
    """A file in the run directory that only grows; what can't be written now waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._pending = b""
        self.problem = ""

    @property
    def has_pending(self) -> bool:
        """Say whether something still waits to be written."""
        return bool(self._pending)

    def write(self, data: bytes) -> None:
        """Write, after what waits from before."""
        self._pending += data
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._open(), self._pending) :]
            self.problem = ""
        except OSError as error:
            self.problem = str(error)
            self.close()

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class _Source:
    """One file of the spool, read as far as was forwarded."""

    def __init__(self, output: Output) -> None:
        self._file = open(output.path, "rb", buffering=0)  # noqa: SIM115 - open until the end
        self.stamper = Stamper(output.rank, output.stream)

    def read(self) -> bytes:
        return self._file.read(CHUNK_BYTES) or b""

    def close(self) -> None:
        self._file.close()


class Forwarder(threading.Thread):
    """Write the node's log, its events and the ranks' error files while the agent goes on."""

    def __init__(
        self, spool: Spool, *, log: Path, events: Path, error_path: Callable[[int], Path]
    ) -> None:
        super().__init__(name="forwarder", daemon=True)
        self._spool, self._error_path = spool, error_path
        self._log, self._events = AppendedFile(log), AppendedFile(events)
        self._sources: dict[Path, _Source] = {}
        self._said: deque[bytes] = deque()
        self._happened: deque[bytes] = deque()
        self._copied: set[int] = set()
        self._complained = ""
        self._ending = threading.Event()

    def say(self, text: str) -> None:
        """Put lines of the agent's own into the log."""
        stamp = _stamp(time.time())
        for line in text.splitlines():
            self._said.append(stamp + b" - a " + line.encode(errors="replace") + b"\n")

    def event(self, event: dict[str, Any]) -> None:
        """Append one event."""
        self._happened.append(json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        """Forward until told to finish, then drain what is left."""
        while not self._ending.is_set():
            if not self._forward_safely():
                self._ending.wait(POLL_S)
        while self._forward_safely() or self._has_pending:
            if self._has_pending:
                time.sleep(POLL_S)  # until `finish` gives up
        now = time.time()
        tails = b"".join(s.stamper.flush(now, is_last=True) for s in self._sources.values())
        self._log.write(tails)
        for source in self._sources.values():
            source.close()

    def finish(self, timeout_s: float) -> bool:
        """Drain and stop; say whether all was written in time."""
        self._ending.set()
        self.join(timeout_s)
        return not (self.is_alive() or self._has_pending)

    @property
    def _has_pending(self) -> bool:
        return self._log.has_pending or self._events.has_pending

    def _forward_safely(self) -> bool:
        try:
            return self._forward()
        except Exception:  # noqa: BLE001 - without this thread the job would go on unseen
            traceback.print_exc()
            return False

    def _forward(self) -> bool:
        """Do one round; say whether there may be more right away."""
        self._events.write(_taken(self._happened))
        self._copy_errors()
        self._log.write(_taken(self._said))
        is_busy = False
        for output in self._spool.outputs():
            # What is not yet written stays in the spool rather than in memory.
            if not self._log.has_pending:
                is_busy = self._forward_output(output) or is_busy
        self._complain()
        return is_busy and not self._log.has_pending

    def _forward_output(self, output: Output) -> bool:
        try:
            source = self._sources.get(output.path) or _Source(output)
            self._sources[output.path] = source
            data = source.read()
        except OSError:
            return False
        now = time.time()
        lines = source.stamper.feed(data, now) if data else source.stamper.flush(now)
        if lines:
            self._log.write(lines)
        return len(data) == CHUNK_BYTES

    def _copy_errors(self) -> None:
        for rank, path in self._spool.error_files().items():
            if rank in self._copied:
                continue
            with contextlib.suppress(OSError):
                target = self._error_path(rank)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.tmp")
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(path.read_bytes())
                temporary.rename(target)
                self._copied.add(rank)

    def _complain(self) -> None:
        """Say once, where somebody may see it, that the run directory can't be written."""
        problem = self._log.problem or self._events.problem
        if problem and problem != self._complained:
            self._complained = problem
            print(f"clusterrun: cannot write logs: {problem}; trying on", file=sys.stderr)  # noqa: T201


def _taken(queue: deque[bytes]) -> bytes:
    """Take everything out of a queue that others still fill."""
    parts = []
    while queue:
        parts.append(queue.popleft())
    return b"".join(parts)
