"""Print log lines in the requested form."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clusterrun.cli.logs.request import Request
from clusterrun.cli.shared import output
from clusterrun.errors import ClusterrunError
from clusterrun.logformat.lines import LogLine
from clusterrun.logs.text import strip_controls
from clusterrun.logs.views import JsonView, RawView, TextView, to_json

_AT_ONCE = 256
_HELD_LINES = 256
_CLEAR = b"\r\x1b[K"
MOST_KEPT = 100_000  # folded lines held to the end, to be counted


@dataclass(kw_only=True)
class LogPrinter:
    """Writes lines to stdout in the requested form, and notes to stderr.

    `nodes` are those known at the start: they give the prefix its width. `is_following`: the lines
    are new. `count`: the lines written; `is_cut`: there were more than requested.
    """

    request: Request
    nodes: Iterable[str]
    is_following: bool = False
    count: int = 0
    is_cut: bool = False
    _attempt: int = field(init=False)
    _view: TextView | JsonView | RawView = field(init=False)
    _last: int | None = field(init=False)  # only this many of the held lines are written
    _held: list[bytes] = field(default_factory=list)
    _status: bytes = b""

    def __post_init__(self) -> None:
        self._attempt = self.request.first_attempt
        self._last = self._kept_lines()
        self._view = self._new_view()

    def print_line(self, line: LogLine) -> None:
        """Print a line, or hold it until its rest or its copies arrive."""
        self._view.show(line)
        self._write()

    def print_lines(self, lines: Sequence[LogLine]) -> None:
        """Print many lines at once."""
        buffers_much = isinstance(self._view, RawView)
        write = self._flush if buffers_much else self._write
        for start in range(0, len(lines), _AT_ONCE):
            self._view.show_all(lines[start : start + _AT_ONCE])
            write()

    def print_errors(self, lines: Sequence[LogLine]) -> None:
        """Print error lines ahead of the last lines, and leave that much less room for these."""
        room, written = self._last, self.count
        self.print_lines(lines)
        self.finish()
        if room is not None:
            self._last = max(room - (self.count - written), 0)

    def start_attempt(self, attempt: int) -> None:
        """Report that the run was started again."""
        self._view.start_attempt(attempt)
        self._flush()
        self._last = self._kept_lines()
        if self._attempt:
            if self.request.form == "json":
                self._held.append(to_json({"type": "attempt", "attempt": attempt}))
            self.note(f"== attempt {attempt} ==")
        self._attempt = attempt

    def print_end(self, state: str, exit_code: int | None) -> None:
        """Report to programs how the job ended."""
        if self.request.form == "json":
            self._held.append(to_json({"type": "end", "state": state, "exit_code": exit_code}))
            self._flush()

    def pause(self) -> None:
        """Show everything that has arrived; do not wait for the end of a line.

        The progress bar of one rank stays in the last row of a terminal.
        """
        query = self.request.query
        has_one_bar = query.overview or len(query.ranks or ()) == 1
        is_live = self.is_following and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if is_live and has_one_bar and isinstance(self._view, TextView):
            self._view.write_held()
            self._flush()
            self._show_status(self._view.unfinished() or "")
        else:
            self._view.pause()
            self._flush()

    def finish(self) -> None:
        """Show the rest."""
        self._view.drain()
        self._flush()

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        self._flush()
        self._show_status("")
        output.say(strip_controls(text, keep_colours=False))

    def _new_view(self) -> TextView | JsonView | RawView:
        request, record, write = self.request, self.request.record, self._held.append
        if request.form == "raw":
            return RawView(write=write, note=self.note)
        if request.form == "json":
            return JsonView(
                write=write,
                paths=record.paths,
                attempt=self._attempt,
                procs_per_node=record.procs_per_node,
            )
        return TextView(
            write=write,
            nodes=self.nodes,
            world_size=record.world_size,
            prefix=request.prefix,
            colour=output.wants_colour(sys.stdout),
            time_chars=request.time_chars,
            dedup=request.folds,
        )

    def _kept_lines(self) -> int | None:
        """Return how many folded lines are written at most."""
        tail = self.request.tail
        is_all = self.is_following or not self.request.folds or (tail or 0) > MOST_KEPT
        return None if is_all else tail

    def _write(self) -> None:
        """Write the held lines if there are many."""
        if not self._held:
            return
        if self._last is not None:
            if len(self._held) > self._last + _HELD_LINES:
                self._keep(self._last)
        elif len(self._held) >= _HELD_LINES:
            self._flush()

    def _flush(self) -> None:
        """Write the held lines, and flush the output."""
        if self._last is not None:
            self._keep(self._last)
        content = b"".join(self._held)
        self.count += content.count(b"\n") or bool(content)  # a last line may lack its end
        if self._status and content:
            self._status, content = b"", _CLEAR + content
        self._held.clear()
        _put(content)

    def _keep(self, last: int) -> None:
        if len(self._held) > last:
            self.is_cut = True
            del self._held[: -last or None]

    def _show_status(self, text: str) -> None:
        """Keep a text in the last row of the terminal until something else is written."""
        columns = shutil.get_terminal_size().columns
        status = text[: columns - 1].encode("utf-8", "replace")
        if status != self._status:
            self._status = status
            _put(_CLEAR + status)


def _put(content: bytes) -> None:
    """Write to stdout. Raises ClusterrunError, but BrokenPipeError for a closed pipe."""
    stream = sys.stdout.buffer
    try:
        rest = memoryview(content)
        while rest:  # under PYTHONUNBUFFERED stdout may write a part
            rest = rest[stream.write(rest) or 0 :]
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ClusterrunError("cannot write to stdout", cause=str(error)) from error
