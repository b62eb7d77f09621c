"""Which lines `logs` was asked for, and how it prints them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import TYPE_CHECKING, Any

from clusterrun.cli import output
from clusterrun.cli.log_writer import TERMINAL_LINES_PER_S, LogWriter
from clusterrun.logs.dedup import LEAST_COPIES
from clusterrun.logs.json_view import JsonView, to_json
from clusterrun.logs.lines import OVERVIEW, LogLine, Selection
from clusterrun.logs.raw_view import RawView
from clusterrun.logs.stamps import stamp_writer
from clusterrun.logs.text_view import Style, TextView

if TYPE_CHECKING:
    from clusterrun.record import JobRecord

DEFAULT_TAIL = 200
_PREFIXES: dict[str | bool, str] = {True: "auto", False: "none"}
_STAMPS: dict[str | bool, str] = {True: "time", False: "none"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which lines of which job are wanted, and in what form; `tail` None means all.

    `form` is text, raw or json; `timestamps` none, time, iso or delta; `prefix` auto, full or none.
    `tz` None is the local zone; `dedup` None folds where that helps people.
    """

    record: JobRecord
    attempt: int | None = None
    nodes: frozenset[str] | None = None
    selection: Selection = OVERVIEW
    tail: int | None = DEFAULT_TAIL
    form: str = "text"
    timestamps: str | bool = "none"
    tz: tzinfo | None = None
    prefix: str | bool = "auto"
    dedup: bool | None = None
    highlight: tuple[re.Pattern[bytes], ...] = ()
    exit_status: bool = False

    @property
    def attempt_now(self) -> int:
        """The attempt that was asked for, or the newest; 0 when none was started."""
        return self.attempt or self.record.paths.newest_attempt()

    @property
    def has_one_rank(self) -> bool:
        """Whether the lines of a single rank are wanted."""
        ranks = self.selection.ranks
        return ranks is not None and len(ranks) == 1 and not self.selection.stderr_of_all

    @property
    def has_one_source(self) -> bool:
        """Whether these lines are of one stream, so that none can be torn by another."""
        return False

    @property
    def folds(self) -> bool:
        """Whether equal lines of several ranks become one: unless asked, where it helps people."""
        if self.dedup is not None:
            return self.dedup
        ranks = self.selection.ranks
        is_few = ranks is not None and len(ranks) < LEAST_COPIES
        return (
            not is_few
            and self.record.world_size >= LEAST_COPIES
            and self.prefix not in (False, "none")
        )


def job_name(record: JobRecord) -> str:
    """Name a job in a sentence."""
    return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"


@dataclass(kw_only=True)
class LogPrinter:
    """Writes lines to stdout in the form that was asked for, and what is beside them to stderr.

    `nodes` are those known at the start: they give the prefix its width. `is_following` says that
    the lines are new ones: a terminal gets no more of them than it can show.
    """

    request: Request
    nodes: Iterable[str]
    is_following: bool = False
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _attempt: int = field(init=False)
    _is_live: bool = field(init=False)
    _writer: LogWriter = field(init=False)
    _view: TextView | JsonView | RawView = field(init=False)

    def __post_init__(self) -> None:
        self._attempt = self.request.attempt_now
        self._is_live = self.is_following and _is_terminal() and self.request.form != "raw"
        limit = TERMINAL_LINES_PER_S if self._is_live else None
        self._writer = LogWriter(tell=output.say, lines_per_s=limit, clock=self.clock)
        self._view = self._new_view()

    def print_line(self, line: LogLine) -> None:
        """Print a line, or keep it until its rest or its copies come."""
        self.count += 1
        self._view.show(line)
        if self._writer.held:
            self._writer.write()

    def print_break(self) -> None:
        """Say to people that the lines before and those after are not neighbours."""
        if isinstance(self._view, TextView):
            self._view.show_break()

    def start_attempt(self, attempt: int) -> None:
        """Say that the run was started again."""
        self._view.start_attempt(attempt)
        if self._attempt:
            self._say(f"== attempt {attempt} ==", {"type": "attempt", "attempt": attempt})
        self._attempt = attempt

    def print_gap(self, node: str) -> None:
        """Say that a file was truncated."""
        gap = {"type": "gap", "node": node, "reason": "truncated"}
        self._say(f"~ the log of {node} was truncated; reading goes on at its beginning", gap)

    def print_end(self, state: str, exit_code: int | None) -> None:
        """Say to programs how the job ended."""
        if self.request.form == "json":
            self._writer.held.append(
                to_json({"type": "end", "state": state, "exit_code": exit_code})
            )
            self._writer.flush()

    def pause(self) -> None:
        """Show everything that has come; a line whose end does not come is not waited for.

        The progress bar of a single rank stays in the last row of a terminal.
        """
        if self._is_live and self.request.has_one_rank and isinstance(self._view, TextView):
            self._view.write_held()
            self._writer.flush()
            self._writer.show_status(self._view.unfinished())
        else:
            self._view.pause()
            self._writer.flush()

    def finish(self) -> None:
        """Show what is left."""
        self._view.drain()
        self._writer.finish()

    def _new_view(self) -> TextView | JsonView | RawView:
        request, record, write = self.request, self.request.record, self._writer.held.append
        if request.form == "raw":
            return RawView(write=write, note=self._note, one_source=request.has_one_source)
        if request.form == "json":
            return JsonView(
                write=write,
                file_of=self._file_of,
                attempt=self._attempt,
                world_size=record.world_size,
                procs_per_node=record.procs_per_node,
                dedup=request.dedup is True,
            )
        return TextView(
            write=write,
            nodes=self.nodes,
            attempt=self._attempt,
            world_size=record.world_size,
            procs_per_node=record.procs_per_node,
            style=self._style(),
            dedup=request.folds,
        )

    def _style(self) -> Style:
        request = self.request
        times = _STAMPS.get(request.timestamps, str(request.timestamps))
        return Style(
            prefix=_PREFIXES.get(request.prefix, str(request.prefix)),
            colour=output.wants_colour(sys.stdout, output.current_session().color, os.environ),
            stamp=stamp_writer(times, request.tz),
            highlight=request.highlight,
        )

    def _file_of(self, attempt: int, node: str) -> str:
        paths = self.request.record.paths
        return str(paths.log(attempt, node).relative_to(paths.root))

    def _note(self, text: str) -> None:
        self._writer.flush()
        output.say(text)

    def _say(self, text: str, data: Mapping[str, Any]) -> None:
        if self.request.form == "json":
            self._writer.held.append(to_json(data))
        self._note(text)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
