"""Which lines `logs` was asked for, and how it prints them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from clusterrun.cli import output
from clusterrun.errors import ClusterrunError
from clusterrun.logs.lines import OVERVIEW, LogLine, Selection
from clusterrun.logs.text import TextView, json_line

if TYPE_CHECKING:
    from clusterrun.record import JobRecord

DEFAULT_TAIL = 200


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which lines of which job are wanted, and in what form; `tail` None means all."""

    record: JobRecord
    attempt: int | None = None
    nodes: frozenset[str] | None = None
    selection: Selection = OVERVIEW
    tail: int | None = DEFAULT_TAIL
    form: str = "text"
    timestamps: bool = False
    prefix: bool = True
    exit_status: bool = False

    @property
    def attempt_now(self) -> int:
        """The attempt that was asked for, or the newest; 0 when none was started."""
        return self.attempt or self.record.paths.newest_attempt()


def job_name(record: JobRecord) -> str:
    """Name a job in a sentence."""
    return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"


@dataclass(kw_only=True)
class LogPrinter:
    """Writes lines to stdout in the form that was asked for, and what is beside them to stderr.

    `nodes` are those known at the start: they give the prefix its width.
    """

    request: Request
    nodes: Iterable[str]
    count: int = 0
    _attempt: int = field(init=False)
    _view: TextView = field(init=False)

    def __post_init__(self) -> None:
        session = output.current_session()
        self._attempt = self.request.attempt_now
        self._view = TextView(
            nodes=self.nodes,
            world_size=self.request.record.world_size,
            colour=output.wants_colour(sys.stdout, session.color, os.environ),
            timestamps=self.request.timestamps,
            prefix=self.request.prefix,
        )

    def print_line(self, line: LogLine) -> None:
        """Print a line, or keep it until its rest comes."""
        self.count += 1
        if self.request.form == "text":
            self._write_texts(self._view.show(line))
        elif self.request.form == "json":
            self._write_texts([self._json(line)])
        else:
            _write(line.text if line.partial else line.text + b"\n")

    def start_attempt(self, attempt: int) -> None:
        """Say that the run was started again."""
        self._write_texts(self._view.drain())
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
            end = {"type": "end", "state": state, "exit_code": exit_code}
            self._write_texts([json.dumps(end) + "\n"])

    def pause(self) -> None:
        """Show everything that has come; a line whose end does not come is not waited for."""
        self._write_texts(self._view.pause())
        _flush()

    def finish(self) -> None:
        """Show what is left."""
        self._write_texts(self._view.drain())
        _flush()

    def _json(self, line: LogLine) -> str:
        record = self.request.record
        path = record.paths.log(self._attempt, line.node).relative_to(record.paths.root)
        return json_line(
            line, attempt=self._attempt, procs_per_node=record.procs_per_node, path=path
        )

    def _say(self, text: str, data: Mapping[str, Any]) -> None:
        if self.request.form == "json":
            self._write_texts([json.dumps(data) + "\n"])
        _flush()
        output.say(text)

    def _write_texts(self, texts: Iterable[str]) -> None:
        for text in texts:
            _write(text.encode("utf-8", "replace"))


def _write(content: bytes) -> None:
    with _stdout() as stream:
        stream.write(content)


def _flush() -> None:
    with _stdout() as stream:
        stream.flush()


@contextmanager
def _stdout() -> Iterator[BinaryIO]:
    """Give stdout for bytes; a reader that went away is no error of ours, a full disk is told."""
    try:
        yield sys.stdout.buffer
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ClusterrunError("cannot write to stdout", cause=str(error)) from error
