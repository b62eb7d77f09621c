"""The lines that the options of `logs` choose, and their form."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, time, timedelta, timezone
from typing import Any, Final, NamedTuple

from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_view import choose_attempts, find_announced
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs.dedup import LEAST_WRITERS
from clusterrun.logs.sources import (
    OVERVIEW,
    STREAMS,
    Catalogue,
    FileKind,
    LogFile,
    Query,
    find_files,
)
from clusterrun.logs.text import strip_controls
from clusterrun.logs.views import JsonView, RawView, TextView, to_json
from clusterrun.rundir.record import JobRecord, read_again
from clusterrun.shared.amounts import SPAN, parse_count, parse_seconds
from clusterrun.shared.hostlist import parse_hostlist, parse_ranks

BATCH: Final = "batch"
DEFAULT_TAIL: Final = 200
_STREAMS: Final = {stream.label: stream for stream in STREAMS}


class Request(NamedTuple):
    """The requested lines of a run, and their form."""

    record: JobRecord
    catalogue: Catalogue
    attempts: tuple[int, ...] = ()  # oldest first; (): the run has not started
    is_chosen: bool = False  # the user named one attempt
    nodes: frozenset[str] | None = None  # None: all
    query: Query = OVERVIEW
    tail: int | None = DEFAULT_TAIL  # the last lines of each attempt; None: all
    form: str = "text"  # or raw, or json
    time_chars: int = 0  # of the time that begins a line
    prefix: bool = True
    dedup: bool | None = None  # None: equal lines are folded for people only
    exit_status: bool = False
    reads_batch: bool = False  # lines of the batch script, without times

    @property
    def first_attempt(self) -> int:
        """The attempt whose lines come first; 0 if none was started."""
        return self.attempts[0] if self.attempts else 0

    @property
    def folds(self) -> bool:
        """Return whether equal lines of several ranks become one line of text."""
        if self.form != "text":
            return False
        if self.dedup is not None:
            return self.dedup
        ranks = self.query.ranks
        writers = self.record.world_size if ranks is None else len(ranks)
        return writers >= LEAST_WRITERS and self.prefix


def title_of(record: JobRecord) -> str:
    """Name the newest job of a run, or the run if it has no job yet."""
    record = read_again(record)
    return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"


def build_request(wanted: dict[str, Any]) -> Request:
    """Check options, by parameter name, against the run. Raises UsageError, JobNotFoundError."""
    record = find_announced(wanted["job"])
    nodes = None if wanted["nodes"] is None else frozenset(parse_hostlist(wanted["nodes"]))
    streams = _streams(wanted["streams"])  # None: the batch script
    catalogue = catalogue_of(record, nodes, batch=streams is None)
    attempts = choose_attempts(title_of(record), catalogue.attempts(), wanted["attempt"])
    query = _query(record, streams, wanted)
    has_prefix = wanted["prefix"] == "auto"
    tail = wanted["tail"]
    if tail is None:
        tail = "all" if wanted["since"] or wanted["until"] else DEFAULT_TAIL
    time_chars = len("12:34:56") if has_prefix else 0
    time_chars = len("12:34:56.789") if wanted["with_times"] else time_chars
    return Request(
        record=record,
        catalogue=catalogue,
        attempts=tuple(attempts),
        is_chosen=isinstance(wanted["attempt"], int),
        nodes=nodes,
        query=query,
        tail=None if tail == "all" else tail,
        time_chars=time_chars if streams else 0,  # the batch script writes no times
        prefix=has_prefix,
        reads_batch=streams is None,
        **{name: wanted[name] for name in ("form", "dedup", "exit_status")},
    )


def catalogue_of(record: JobRecord, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
    """Return the logs of a run or of some nodes; or the batch script's output, as one attempt."""
    paths = record.paths
    if not batch:
        return Catalogue(paths.attempts, lambda attempt: find_files(paths, attempt, nodes))
    script = LogFile(node=BATCH, path=paths.batch_output, kind=FileKind.PLAIN)
    return Catalogue(lambda: [1], lambda _: [script] if script.path.is_file() else [])


def read_tail(text: str) -> int | str:
    """Read `--tail`: a number of lines, or `all`."""
    if text == "all":
        return text
    value = parse_count(text)
    if value is None or value != int(value):
        raise UsageError(f"'{text}' is not a number of lines", hint="write -n 200, or -n all")
    return int(value)


def read_attempt(text: str) -> int | str:
    """Read `--attempt`: a number, -1 for the one before the newest, or `all`."""
    if text == "all":
        return text
    if not re.fullmatch(r"-?[1-9][0-9]{0,8}", text):
        raise UsageError(f"'{text}' is not an attempt", hint="write a number, e.g. 1 or -1, or all")
    return int(text)


def _query(record: JobRecord, streams: frozenset[Stream] | None, wanted: dict[str, Any]) -> Query:
    """Check the chosen ranks, lines and times; `streams` None: of the batch script."""
    if wanted["all_ranks"] and wanted["ranks"] is not None:
        raise UsageError("--rank and --all-ranks cannot be combined", hint="keep one of them")
    if streams is None and wanted["errors"]:
        raise UsageError(f"--errors and --stream {BATCH} cannot be combined", hint="keep one")
    ranks = None
    if wanted["ranks"] is not None:
        ranks = parse_ranks(wanted["ranks"], record.world_size, of=f"{title_of(record)} has ranks")
    given = any(each is not None for each in (ranks, wanted["nodes"], wanted["streams"]))
    has_choice = wanted["all_ranks"] or wanted["errors"] or given
    since_us, until_us = (
        _moment(f"--{name}", wanted[name], record=record, batch=streams is None)
        for name in ("since", "until")
    )
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError("--since is not before --until", hint="choose an earlier --since")
    return Query(
        ranks=ranks,
        streams=streams or STREAMS,
        overview=not has_choice,
        errors=wanted["errors"],
        include=_patterns("--include", wanted["include"]),
        exclude=_patterns("--exclude", wanted["exclude"]),
        since_us=since_us,
        until_us=until_us,
    )


def _streams(text: str | None) -> frozenset[Stream] | None:
    """Read a list of streams; None: the batch script's output, without times. Raises UsageError."""
    if text is None:
        return STREAMS
    names = [name.strip() for name in text.split(",")]
    if names == [BATCH]:
        return None
    for name in names:
        if name not in _STREAMS:
            hint = f"use {', '.join(sorted(_STREAMS))}, or only {BATCH}, which has no times"
            raise UsageError(f"no stream '{name}' to merge", hint=hint)
    return frozenset(_STREAMS[name] for name in names)


def _patterns(option: str, texts: Collection[str]) -> tuple[re.Pattern[bytes], ...]:
    """Compile regular expressions over the bytes of a line. Raises UsageError for a bad one."""
    try:
        return tuple(re.compile(text.encode("utf-8", "surrogateescape")) for text in texts)
    except re.error as error:
        hint = "write a Python regular expression, e.g. 'loss|lr'"
        raise UsageError(f"bad {option} pattern: {error}", hint=hint) from error


def _moment(option: str, text: str | None, *, record: JobRecord, batch: bool) -> int | None:
    """Read a moment as epoch µs. Raises UsageError that names the option."""
    if text is None:
        return None
    if batch:
        who = f"the batch script of {title_of(record)}"
        raise UsageError(f"{option}: the output of {who} has no times", hint=f"leave out {option}")
    try:
        return parse_moment(text, datetime.now())
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hints) from error


_CLOCK: Final = re.compile(r"[0-2]?[0-9]:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{3})?)?\Z")
_HINT: Final = "write 10m, 1h30m, 12:30, 2026-08-01 or 2026-08-01T12:30"


def parse_moment(text: str, now: datetime) -> int:
    """Return a moment as epoch µs.

    Times without a zone are in that of `now` (none: this machine's). A time of day is the latest
    one that is not in the future. Raises UsageError.
    """
    stripped = text.strip()
    try:
        if re.match(SPAN, stripped):
            moment = now.astimezone(timezone.utc) - timedelta(seconds=parse_seconds(stripped))
        elif _CLOCK.match(stripped):
            clock = time.fromisoformat(stripped if stripped[1] != ":" else f"0{stripped}")
            moment = datetime.combine(now, clock, now.tzinfo)
            if moment > now:
                moment -= timedelta(days=1)
        else:  # Python 3.10 does not accept the Z
            moment = datetime.fromisoformat(re.sub(r"[Zz]\Z", "+00:00", stripped))
            moment = moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
        return round(moment.timestamp() * 1_000_000)
    except (ValueError, OverflowError, OSError):  # OSError: a year beyond this machine's zone
        raise UsageError(f"'{text}' is not a time", hint=_HINT) from None


_AT_ONCE = 256
_CLEAR = b"\r\x1b[K"
MOST_KEPT = 100_000  # folded lines that are held until the last ones are known


class LogPrinter:
    """Writes lines to stdout in the requested form, and notes to stderr."""

    def __init__(
        self, request: Request, nodes: Iterable[str], *, is_following: bool = False
    ) -> None:
        self.request = request
        self.nodes = nodes  # those known at the start give the prefix its width
        self.is_following = is_following  # the lines are new
        self.count = 0  # of lines written
        self.is_cut = False  # there were more than requested
        self._attempt = request.first_attempt
        self._held: list[bytes] = []
        self._status = b""  # what the last row of the terminal shows
        self._most = self._most_lines()  # only so many of the held lines are written
        self._view = self._new_view()

    def print_lines(self, lines: Sequence[LogLine]) -> None:
        """Print lines, or hold them until their rest or their copies arrive."""
        # The raw view joins several lines into one entry: `_write`, which counts entries, would
        # hold too much. Flushing them drops none: only folded text has a `_most`.
        write = self._flush if isinstance(self._view, RawView) and len(lines) > 1 else self._write
        for start in range(0, len(lines), _AT_ONCE):
            self._view.show_all(lines[start : start + _AT_ONCE])
            write()

    def start_attempt(self, attempt: int) -> None:
        """Report that the run was started again."""
        self._view.start_attempt(attempt)
        self._flush()
        self._most = self._most_lines()
        if self._attempt:  # 0: the run had not started, and its first attempt is no news
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

    def _most_lines(self) -> int | None:
        """Return the most lines to write; None for all. Only folded ones have not been counted."""
        tail = self.request.tail
        is_all = self.is_following or not self.request.folds or (tail or 0) > MOST_KEPT
        return None if is_all else tail

    def _write(self) -> None:
        """Write the held lines if there are many, or drop those that are not among the last."""
        if len(self._held) >= _AT_ONCE + (self._most or 0):
            if self._most is None:
                self._flush()
            else:
                self._drop_older()

    def _flush(self) -> None:
        """Write the held lines, and flush the output."""
        self._drop_older()
        content = b"".join(self._held)
        self.count += content.count(b"\n") or bool(content)  # a last line may lack its end
        if self._status and content:
            self._status, content = b"", _CLEAR + content
        self._held.clear()
        _put(content)

    def _drop_older(self) -> None:
        """Drop held lines that are not among the last."""
        if self._most is not None and len(self._held) > self._most:
            self.is_cut = True
            del self._held[: len(self._held) - self._most]

    def _show_status(self, text: str) -> None:
        """Keep a text in the last row of the terminal until something else is written."""
        status = text[: shutil.get_terminal_size().columns - 1].encode("utf-8", "replace")
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
