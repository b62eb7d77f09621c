"""Print log lines in the requested form."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from clusterrun.cli.logs.request import Request
from clusterrun.cli.logs.writer import TERMINAL_LINES_PER_S, LogWriter
from clusterrun.cli.shared import output
from clusterrun.logformat.lines import LogLine
from clusterrun.logs.context import Break
from clusterrun.logs.json_view import JsonView, to_json
from clusterrun.logs.raw_view import RawView
from clusterrun.logs.stamps import stamp_writer
from clusterrun.logs.text import strip_controls
from clusterrun.logs.text_view import Style, TextView

_AT_ONCE = 256
MOST_KEPT = 100_000  # folded lines held to the end, to be counted


@dataclass(kw_only=True)
class LogPrinter:
    """Writes lines to `target` (None: stdout) in the requested form, and notes to stderr.

    `nodes` are those known at the start: they give the prefix its width. `is_following`: the lines
    are new, and a terminal gets only as many as it can show.
    """

    request: Request
    nodes: Iterable[str]
    is_following: bool = False
    target: BinaryIO | None = None
    clock: Callable[[], float] = time.monotonic
    _attempt: int = field(init=False)
    _is_live: bool = field(init=False)
    _writer: LogWriter = field(init=False)
    _view: TextView | JsonView | RawView = field(init=False)

    def __post_init__(self) -> None:
        self._attempt = self.request.first_attempt
        self._is_live = self.is_following and _is_terminal() and self.request.form != "raw"
        limit = TERMINAL_LINES_PER_S if self._is_live else None
        self._writer = LogWriter(
            tell=output.say,
            lines_per_s=limit,
            clock=self.clock,
            target=self.target,
            last=self._kept_lines(),
        )
        self._view = self._new_view()

    @property
    def count(self) -> int:
        """The number of lines that were written."""
        return self._writer.count

    @property
    def is_cut(self) -> bool:
        """Return whether there were more lines than requested."""
        return self._writer.is_cut

    def print_line(self, line: LogLine) -> None:
        """Print a line, or hold it until its rest or its copies arrive."""
        self._view.show(line if self.request.has_times else line._replace(epoch_us=0))
        if self._writer.held:
            self._writer.write()

    def print_lines(self, lines: Sequence[LogLine]) -> None:
        """Print many lines at once."""
        if not self.request.has_times:
            lines = [line._replace(epoch_us=0) for line in lines]
        writer = self._writer
        write = (
            writer.flush if isinstance(self._view, RawView) else writer.write
        )  # it buffers a lot
        for start in range(0, len(lines), _AT_ONCE):
            self._view.show_all(lines[start : start + _AT_ONCE])
            write()

    def print_errors(self, lines: Sequence[LogLine]) -> None:
        """Print error lines ahead of the last lines, and leave that much less room for these."""
        writer = self._writer
        room, written = writer.last, writer.count
        self.print_lines(lines)
        self._view.drain()
        writer.flush()
        if room is not None:
            writer.last = max(room - (writer.count - written), 0)

    def print_in_context(self, lines: Iterable[LogLine | Break]) -> None:
        """Print lines one at a time; mark the gaps between them in text."""
        for line in lines:
            if not isinstance(line, Break):
                self.print_line(line)
            elif isinstance(self._view, TextView):
                self._view.show_break()

    def start_attempt(self, attempt: int) -> None:
        """Report that the run was started again."""
        self._view.start_attempt(attempt)
        self._writer.flush()
        self._writer.last = self._kept_lines()
        if self._attempt:
            self._say(f"== attempt {attempt} ==", {"type": "attempt", "attempt": attempt})
        self._attempt = attempt

    def print_truncated(self, node: str) -> None:
        """Report that a file was truncated."""
        gap = {"type": "gap", "node": node, "reason": "truncated"}
        self._say(f"~ {node} file was truncated, continuing", gap)

    def print_end(self, state: str, exit_code: int | None) -> None:
        """Report to programs how the job ended."""
        if self.request.form == "json":
            self._writer.held.append(
                to_json({"type": "end", "state": state, "exit_code": exit_code})
            )
            self._writer.flush()

    def pause(self) -> None:
        """Show everything that has arrived; do not wait for the end of a line.

        The progress bar of one rank stays in the last row of a terminal.
        """
        has_one_bar = self.request.has_one_rank or self.request.query.overview
        if self._is_live and has_one_bar and isinstance(self._view, TextView):
            self._view.write_held()
            self._writer.flush()
            self._writer.show_status(self._view.unfinished())
        else:
            self._view.pause()
            self._writer.flush()

    def finish(self) -> None:
        """Show the rest."""
        self._view.drain()
        self._writer.finish()

    def _new_view(self) -> TextView | JsonView | RawView:
        request, job, write = self.request, self.request.job, self._writer.held.append
        if request.form == "raw":
            return RawView(write=write, note=self.note, one_source=request.has_one_source)
        if request.form == "json":
            return JsonView(
                write=write,
                file_of=job.file_of,
                attempt=self._attempt,
                world_size=job.world_size,
                procs_per_node=job.procs_per_node,
                dedup=request.dedup is True,
            )
        return TextView(
            write=write,
            nodes=self.nodes,
            attempt=self._attempt,
            world_size=job.world_size,
            procs_per_node=job.procs_per_node,
            style=Style(
                prefix=request.prefix,
                colour=self._wants_colour(),
                stamp=stamp_writer(request.timestamps, request.tz),
                highlight=request.highlight,
            ),
            dedup=request.folds,
        )

    def _kept_lines(self) -> int | None:
        """Return how many folded lines are written at most; context lines do not count."""
        request = self.request
        is_all = self.is_following or request.context or not request.folds
        return None if is_all or (request.tail or 0) > MOST_KEPT else request.tail

    def _wants_colour(self) -> bool:
        stream = sys.stdout if self.target is None else None
        return output.wants_colour(stream, output.current_session().color, os.environ)

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        self._writer.flush()
        self._writer.show_status(None)
        output.say(strip_controls(text, keep_colours=False))

    def _say(self, text: str, data: Mapping[str, Any]) -> None:
        if self.request.form == "json":
            self._writer.held.append(to_json(data))
        self.note(text)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
