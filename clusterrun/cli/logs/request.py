"""The lines that the options of `logs` choose."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from clusterrun.cli.shared.job_text import choose_attempts, find_announced
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.dedup import LEAST_WRITERS
from clusterrun.logs.files import Catalogue, FileKind, LogFile, find_files
from clusterrun.logs.sources import OVERVIEW, STREAMS, Query
from clusterrun.rundir.record import JobRecord, read_again
from clusterrun.shared.durations import SPAN, parse_seconds
from clusterrun.shared.hostlist import parse_hostlist, parse_ranks
from clusterrun.shared.sizes import parse_count

BATCH: Final = "batch"
DEFAULT_TAIL: Final = 200
_STREAMS: Final = {stream.label: stream for stream in STREAMS}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The requested lines of a run, and their form.

    `attempts`: those to read, oldest first; none if the run has not started. `is_chosen`: the user
    named one of them. `tail` None means all lines of each, `nodes` None all nodes. `form` is text,
    raw or json; `time_chars` of the times are printed. `dedup` None folds for people only.
    `reads_batch`: the lines are those of the batch script, without times.
    """

    record: JobRecord
    catalogue: Catalogue
    attempts: tuple[int, ...] = ()
    is_chosen: bool = False
    nodes: frozenset[str] | None = None
    query: Query = OVERVIEW
    tail: int | None = DEFAULT_TAIL
    form: str = "text"
    time_chars: int = 0
    prefix: bool = True
    dedup: bool | None = None
    exit_status: bool = False
    reads_batch: bool = False

    @property
    def first_attempt(self) -> int:
        """The attempt whose lines come first; 0 if none was started."""
        return self.attempts[0] if self.attempts else 0

    @property
    def title(self) -> str:
        """The newest job of the run, or the run if it has no job yet."""
        return _title(self.record)

    @property
    def folds(self) -> bool:
        """Return whether equal lines of several ranks become one line of text."""
        if self.form != "text" or self.dedup is not None:
            return self.form == "text" and self.dedup is True
        ranks = self.query.ranks
        writers = self.record.world_size if ranks is None else len(ranks)
        return writers >= LEAST_WRITERS and self.prefix


def _title(record: JobRecord) -> str:
    record = read_again(record)
    return f"job {record.job_id}" if record.job_id else f"run {record.run_id}"


def build_request(wanted: Mapping[str, Any]) -> Request:
    """Check the options of `logs`, by parameter name, against the run that they name.

    Raises UsageError, and JobNotFoundError without the run.
    """
    record = find_announced(wanted["job"])
    nodes, attempt = _named_by_log(record, wanted["job"] or "")
    nodes = nodes if wanted["nodes"] is None else frozenset(parse_hostlist(wanted["nodes"]))
    streams = _streams(wanted["streams"])
    catalogue = catalogue_of(record, nodes, batch=streams is None)
    attempt = attempt if wanted["attempt"] is None else wanted["attempt"]
    attempts = choose_attempts(_title(record), catalogue.attempts(), attempt)
    query = _query(record, nodes, streams, wanted)
    has_prefix = wanted["prefix"] == "auto"
    tail = wanted["tail"]
    if tail is None:
        tail = "all" if wanted["since"] or wanted["until"] else DEFAULT_TAIL
    time_chars = 12 if wanted["with_times"] else 8 if has_prefix else 0
    return Request(
        record=record,
        catalogue=catalogue,
        attempts=tuple(attempts),
        is_chosen=isinstance(attempt, int),
        nodes=nodes,
        query=query,
        tail=None if tail == "all" else tail,
        form=wanted["form"],
        time_chars=time_chars if streams else 0,
        prefix=has_prefix,
        dedup=wanted["dedup"],
        exit_status=wanted["exit_status"],
        reads_batch=streams is None,
    )


def _named_by_log(record: JobRecord, name: str) -> tuple[frozenset[str] | None, int | None]:
    """Return the node and the attempt whose log a name is, if it is the path of one."""
    path = Path(name).resolve()
    attempt = path.parent.name[1:]
    if attempt.isdecimal() and record.paths.log(int(attempt), path.stem).resolve() == path:
        return frozenset({path.stem}), int(attempt)
    return None, None


def catalogue_of(record: JobRecord, nodes: frozenset[str] | None, *, batch: bool) -> Catalogue:
    """Return the logs of a run, or those of some nodes; or the batch script's own output."""
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


def _query(
    record: JobRecord,
    nodes: frozenset[str] | None,
    streams: frozenset[Stream] | None,
    wanted: Mapping[str, Any],
) -> Query:
    if wanted["all_ranks"] and wanted["ranks"] is not None:
        raise UsageError("--rank and --all-ranks cannot be combined", hint="keep one of them")
    if streams is None and wanted["errors"]:
        raise UsageError(f"--errors and --stream {BATCH} cannot be combined", hint="keep one")
    ranks = wanted["ranks"] and parse_ranks(
        wanted["ranks"], record.world_size, of=f"{_title(record)} has ranks"
    )
    chosen = (ranks, nodes, wanted["streams"])
    is_chosen = wanted["all_ranks"] or wanted["errors"] or any(c is not None for c in chosen)
    since_us, until_us = (
        _moment(f"--{name}", wanted[name], record=record, batch=streams is None)
        for name in ("since", "until")
    )
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError("--since is not before --until", hint="choose an earlier --since")
    return Query(
        ranks=ranks,
        streams=streams or STREAMS,
        overview=not is_chosen,
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
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text.encode("utf-8", "surrogateescape")))
        except re.error as error:
            hint = "write a Python regular expression, e.g. 'loss|lr'"
            raise UsageError(f"bad {option} pattern: {error}", hint=hint) from error
    return tuple(compiled)


def _moment(option: str, text: str | None, *, record: JobRecord, batch: bool) -> int | None:
    """Read a moment as epoch µs. Raises UsageError that names the option."""
    if text is None:
        return None
    if batch:
        whose = f"the batch script of {_title(record)}"
        raise UsageError(f"{option}: the lines of {whose} have no times", hint=f"drop {option}")
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
            moment -= timedelta(days=moment > now)
        else:  # Python 3.10 does not accept the Z
            moment = datetime.fromisoformat(re.sub(r"[Zz]\Z", "+00:00", stripped))
            moment = moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
        return round(moment.timestamp() * 1_000_000)
    except (ValueError, OverflowError, OSError):  # OSError: a year beyond this machine's zone
        raise UsageError(f"'{text}' is not a time", hint=_HINT) from None
