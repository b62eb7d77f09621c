"""What `logs` was asked for: its options as they were typed, and what they mean for a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import tzinfo

from clusterrun.cli import log_options as options
from clusterrun.cli.log_find import Named
from clusterrun.cli.log_job import LogJob
from clusterrun.errors import UsageError
from clusterrun.hostlist import parse_hostlist
from clusterrun.logs.catalogue import Catalogue
from clusterrun.logs.dedup import LEAST_COPIES
from clusterrun.logs.lines import Stream
from clusterrun.logs.query import OVERVIEW, STREAMS, Query

DEFAULT_TAIL = 200
_OF_RANKS = frozenset({Stream.OUT, Stream.ERR})


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The options as they were typed; `whole`: for a file, all lines as they are unless said."""

    ranks: str | None = None
    local_ranks: str | None = None
    all_ranks: bool = False
    nodes: str | None = None
    streams: str | None = None
    attempt: int | str | None = None
    tail: int | str | None = None
    since: str | None = None
    until: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    highlight: tuple[str, ...] = ()
    errors: bool = False
    context: int = 0
    timestamps: str | None = None
    tz: str | None = None
    prefix: str = "auto"
    form: str = "text"
    dedup: bool | None = None
    interval: float | None = None
    exit_status: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which lines of which job are wanted, and in what form.

    `attempts` are those to read, oldest first, none where the run has not started; `is_chosen`
    says that one of them was named. `tail` None means all lines of each, `nodes` None all nodes.
    `form` is text, raw or json; `prefix` auto, full or none; `timestamps` none, clock (whole
    seconds), time, iso or delta. `has_times` says that the lines carry any.
    `tz` None is the local zone; `dedup` None folds where that helps people; `interval_s` None is
    a pace that suits the number of files.
    """

    job: LogJob
    catalogue: Catalogue
    attempts: tuple[int, ...] = ()
    is_chosen: bool = False
    nodes: frozenset[str] | None = None
    query: Query = OVERVIEW
    tail: int | None = DEFAULT_TAIL
    context: int = 0
    form: str = "text"
    has_times: bool = True
    timestamps: str = "none"
    tz: tzinfo | None = None
    prefix: str = "auto"
    dedup: bool | None = None
    highlight: tuple[re.Pattern[bytes], ...] = ()
    interval_s: float | None = None
    exit_status: bool = False
    reads_batch: bool = False

    @property
    def first_attempt(self) -> int:
        """The attempt whose lines come first; 0 when none was started."""
        return self.attempts[0] if self.attempts else 0

    @property
    def has_one_rank(self) -> bool:
        """Whether the lines of a single rank are wanted."""
        return self.query.ranks is not None and len(self.query.ranks) == 1

    @property
    def has_one_source(self) -> bool:
        """Whether the lines are of one stream of one rank, which nobody else's can tear."""
        return self.has_one_rank and len(self.query.streams & _OF_RANKS) == 1

    @property
    def folds(self) -> bool:
        """Whether equal lines of several ranks become one line of text: where it helps people."""
        if self.form != "text" or self.dedup is not None:
            return self.form == "text" and self.dedup is True
        ranks = self.query.ranks
        writers = self.job.world_size if ranks is None else len(ranks)
        return writers >= LEAST_COPIES and self.prefix != "none"


def build_request(named: Named, typed: Typed) -> Request:
    """Check what was typed against the job. Raises UsageError."""
    job = named.job
    node = named.nodes if typed.nodes is None else frozenset(parse_hostlist(typed.nodes))
    streams = options.choose_streams(typed.streams)
    catalogue = job.catalogue(node, batch=streams is None)
    newest = catalogue.newest_attempt()
    wanted = named.attempt if typed.attempt is None else typed.attempt
    attempts = options.choose_attempts(job.title, newest, wanted)
    zone = options.choose_zone(typed.tz)
    query = _query(job, node, typed, zone=zone, attempt=max(attempts, default=0))
    highlight = options.compile_patterns("--highlight", typed.highlight)
    has_times = job.record is not None and streams is not None
    return Request(
        job=job,
        catalogue=catalogue,
        attempts=tuple(attempts),
        is_chosen=isinstance(wanted, int),
        nodes=node,
        query=query,
        tail=_tail(typed),
        context=typed.context,
        form=typed.form,
        has_times=has_times,
        timestamps=_times(typed) if has_times else "none",
        tz=zone,
        prefix=typed.prefix,
        dedup=bool(typed.dedup) if typed.whole else typed.dedup,  # what is saved is data
        highlight=(*highlight, *query.include),
        interval_s=typed.interval,
        exit_status=typed.exit_status,
        reads_batch=streams is None,
    )


def _times(typed: Typed) -> str:
    """Choose the time of day where people are told who wrote a line."""
    return typed.timestamps or ("clock" if typed.prefix != "none" else "none")


def _tail(typed: Typed) -> int | None:
    """Read how many lines are meant: all where a time was given, as it says how many."""
    if typed.tail is None:
        return None if typed.whole or typed.since or typed.until else DEFAULT_TAIL
    return None if typed.tail == "all" else int(typed.tail)


def _query(
    job: LogJob,
    node: frozenset[str] | None,
    typed: Typed,
    *,
    zone: tzinfo | None,
    attempt: int,
) -> Query:
    if typed.all_ranks and typed.ranks is not None:
        raise UsageError("--rank and --all-ranks exclude each other")
    ranks = options.choose_ranks(job, ranks=typed.ranks, local_ranks=typed.local_ranks)
    streams = options.choose_streams(typed.streams)
    chosen = (ranks, node, typed.streams)
    is_overview = not (typed.all_ranks or typed.errors or any(c is not None for c in chosen))
    since_us, until_us = (
        options.choose_moment(
            option, text, job=job, attempt=attempt, zone=zone, batch=streams is None
        )
        for option, text in (("--since", typed.since), ("--until", typed.until))
    )
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError("--since is not before --until")
    return Query(
        ranks=ranks,
        streams=streams or STREAMS,
        overview=is_overview and job.record is not None,
        errors=typed.errors,
        include=options.compile_patterns("--include", typed.include),
        exclude=options.compile_patterns("--exclude", typed.exclude),
        since_us=since_us,
        until_us=until_us,
    )
