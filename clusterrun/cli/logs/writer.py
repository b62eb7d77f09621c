"""Write log lines in large pieces, and to a terminal no faster than it can show them."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from clusterrun.errors import ClusterrunError
from clusterrun.shared.wording import count

TERMINAL_LINES_PER_S = 2_000
_HELD_LINES = 256
_HELD_S = 0.05
_CLEAR = b"\r\x1b[K"


@dataclass(kw_only=True)
class LogWriter:
    """Holds lines for a moment, and writes them to `target` (None: stdout).

    Above `lines_per_s`, the later lines of each second are dropped; `tell` reports how many.
    With `last`, `flush` writes only that many of the last lines; `is_cut`: there were more.
    `count`: the lines written.
    """

    tell: Callable[[str], None]
    lines_per_s: int | None = None
    clock: Callable[[], float] = time.monotonic
    target: BinaryIO | None = None
    last: int | None = None
    is_cut: bool = False
    count: int = 0
    held: list[bytes] = field(default_factory=list)
    _due_at: float = 0.0
    _second_at: float = 0.0
    _room: int = 0
    _skipped: int = 0
    _status: bytes = b""

    def write(self) -> None:
        """Write the held lines if there are many, or if they have waited."""
        if self.last is not None:
            if len(self.held) > self.last + _HELD_LINES:
                self._keep(self.last)
        elif len(self.held) >= _HELD_LINES or (self.held and self.clock() >= self._due_at):
            self.flush()

    def flush(self) -> None:
        """Write the held lines, and flush the output."""
        if self.last is not None:
            self._keep(self.last)
        lines = self.held if self.lines_per_s is None else self._allowed(self.lines_per_s)
        if self._status and lines:
            lines.insert(0, _CLEAR)
            self._status = b""
        content = b"".join(lines)
        self.count += content.count(b"\n") or bool(content)  # a last line may lack its end
        self._put(content)
        self.held.clear()
        self._due_at = self.clock() + _HELD_S

    def show_status(self, text: str | None) -> None:
        """Keep a text in the last row of the terminal until something else is written."""
        columns = shutil.get_terminal_size().columns
        status = (text or "")[: columns - 1].encode("utf-8", "replace")
        if status == self._status:
            return
        self._status = status
        self._put(_CLEAR + status)

    def finish(self) -> None:
        """Write everything, and report skipped lines."""
        self.flush()
        self._tell_skipped(self.clock())

    def _keep(self, last: int) -> None:
        if len(self.held) > last:
            self.is_cut = True
            del self.held[: -last or None]

    def _allowed(self, lines_per_s: int) -> list[bytes]:
        now = self.clock()
        if now - self._second_at >= 1:
            self._tell_skipped(now)
            self._second_at, self._room = now, lines_per_s
        allowed = self.held[: self._room]
        self._skipped += len(self.held) - len(allowed)
        self._room -= len(allowed)
        return allowed

    def _tell_skipped(self, now: float) -> None:
        if self._skipped:
            self.tell(
                f"… {count(f'{self._skipped:,}', 'line')} skipped in {now - self._second_at:.1f} s "
                "(use --include or redirect to a file)"
            )
            self._skipped = 0

    def _put(self, content: bytes) -> None:
        """Write to the output. Raises ClusterrunError, but BrokenPipeError for a closed pipe."""
        stream = sys.stdout.buffer if self.target is None else self.target
        try:
            rest = memoryview(content)
            while rest:  # under PYTHONUNBUFFERED stdout may write a part
                rest = rest[stream.write(rest) or 0 :]
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            name = "stdout" if self.target is None else "the file"
            raise ClusterrunError(f"cannot write to {name}", cause=str(error)) from error
