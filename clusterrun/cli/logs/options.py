"""What the options of `logs` mean: attempts, ranks, streams, patterns, moments."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime, tzinfo
from decimal import Decimal
from typing import Final

from clusterrun.cli.logs.job import LogJob
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.catalogue import BATCH
from clusterrun.logs.moments import parse_moment, step_finder
from clusterrun.logs.query import STREAMS
from clusterrun.shared.durations import parse_span
from clusterrun.shared.hostlist import parse_ranks
from clusterrun.shared.sizes import parse_count

LEAST_INTERVAL_S: Final = Decimal("0.1")
_STREAMS: Final = {stream.label: stream for stream in STREAMS}


def tail(text: str) -> int | str:
    """Read `--tail`: a number of lines, or `all`."""
    if text == "all":
        return text
    value = parse_count(text)
    if value is None or value != int(value):
        raise UsageError(f"'{text}' is not a number of lines", hint="write -n 200, or -n all")
    return int(value)


def interval(text: str) -> float:
    """Read `--interval`: a span of time, at least 0.1 s."""
    seconds = parse_span(text)
    if seconds is None or seconds < LEAST_INTERVAL_S:
        least = f"--interval must be at least {LEAST_INTERVAL_S} s, not '{text}'"
        raise UsageError(least, hint="write a time, e.g. 2s")
    return float(seconds)


def attempt(text: str) -> int | str:
    """Read `--attempt`: a number, -1 for the one before the newest, or `all`."""
    if text == "all":
        return text
    if not re.fullmatch(r"-?[1-9][0-9]{0,8}", text):
        raise UsageError(f"'{text}' is not an attempt", hint="write a number, e.g. 1 or -1, or all")
    return int(text)


def choose_ranks(
    job: LogJob, *, ranks: str | None, local_ranks: str | None
) -> frozenset[int] | None:
    """Return the global ranks that are in both sets; None if neither was given."""
    chosen = None
    if job.record is None and (ranks is not None or local_ranks is not None):
        raise UsageError(f"the lines of {job.title} have no ranks", hint="drop the ranks")
    if ranks is not None:
        chosen = parse_ranks(ranks, job.world_size, of=f"{job.title} has ranks")
    if local_ranks is None:
        return chosen
    size = job.procs_per_node
    try:
        local = parse_ranks(local_ranks, size, of="each node has local ranks")
    except UsageError as error:
        raise UsageError(f"--local-rank: {error.message}", hint=error.hints) from error
    everybody = range(job.world_size) if chosen is None else chosen
    both = frozenset(rank for rank in everybody if rank % size in local)
    if not both:
        message = f"none of the ranks {ranks} has a local rank in {local_ranks}"
        raise UsageError(message, hint="drop --rank or --local-rank")
    return both


def choose_streams(text: str | None) -> frozenset[Stream] | None:
    """Read a list of streams; None: the batch script's output, without times. Raises UsageError."""
    if text is None:
        return STREAMS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _STREAMS and name != BATCH:
            known = ", ".join([*sorted(_STREAMS), BATCH])
            raise UsageError(f"no stream '{name}'", hint=f"use one of: {known}")
    if names == [BATCH]:
        return None
    if BATCH in names:
        hint = f"pass only --stream {BATCH}; its lines have no times to merge by"
        raise UsageError(f"stream '{BATCH}' cannot be combined with others", hint=hint)
    return frozenset(_STREAMS[name] for name in names)


def compile_patterns(option: str, texts: Collection[str]) -> tuple[re.Pattern[bytes], ...]:
    """Compile regular expressions over the bytes of a line. Raises UsageError for a bad one."""
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text.encode("utf-8", "surrogateescape")))
        except re.error as error:
            hint = "write a Python regular expression, e.g. 'loss|lr'"
            raise UsageError(f"bad {option} pattern: {error}", hint=hint) from error
    return tuple(compiled)


def choose_moment(
    option: str, text: str | None, *, job: LogJob, attempt: int, zone: tzinfo | None, batch: bool
) -> int | None:
    """Read a moment as epoch µs. Raises UsageError that names the option."""
    if text is None:
        return None
    if job.record is None or batch:
        whose = f"the batch script of {job.title}" if batch else job.title
        raise UsageError(f"{option}: the lines of {whose} have no times", hint=f"drop {option}")
    steps = step_finder(job.record.paths, attempt, before=option == "--since")
    try:
        return parse_moment(text, now=datetime.now(zone), find_step=steps)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hints) from error
