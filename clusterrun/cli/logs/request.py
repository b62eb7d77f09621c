"""The lines that the options of `logs` choose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

from clusterrun.cli.logs import options
from clusterrun.cli.logs.find import Named
from clusterrun.cli.logs.job import LogJob
from clusterrun.cli.shared.job_text import choose_attempts
from clusterrun.errors import UsageError
from clusterrun.logformat.lines import Stream
from clusterrun.logs.catalogue import Catalogue
from clusterrun.logs.dedup import LEAST_WRITERS
from clusterrun.logs.moments import parse_zone
from clusterrun.logs.query import OVERVIEW, STREAMS, Query
from clusterrun.shared.hostlist import parse_hostlist

DEFAULT_TAIL = 200
_OF_RANKS = frozenset({Stream.OUT, Stream.ERR})


@dataclass(frozen=True, kw_only=True)
class Request:
    """The requested lines of a job, and their form.

    `attempts`: those to read, oldest first; none if the run has not started. `is_chosen`: the user
    named one of them. `tail` None means all lines of each, `nodes` None all nodes.
    `form` is text, raw or json; `prefix` auto, full or none; `timestamps` none, clock (whole
    seconds), time, iso or delta; `has_times`: the lines carry any. `tz` None is the local zone;
    `dedup` None folds for people only; `interval_s` None depends on the number of files.
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
        """The attempt whose lines come first; 0 if none was started."""
        return self.attempts[0] if self.attempts else 0

    @property
    def has_one_rank(self) -> bool:
        """Return whether the lines of a single rank are wanted."""
        return self.query.ranks is not None and len(self.query.ranks) == 1

    @property
    def has_one_source(self) -> bool:
        """Return whether the lines are of one stream of one rank, which no other line can split."""
        return self.has_one_rank and len(self.query.streams & _OF_RANKS) == 1

    @property
    def shows_agents(self) -> bool:
        """Return whether all lines of the agents are shown."""
        query = self.query
        is_chosen = query.errors or query.include or query.exclude or query.ranks is not None
        return Stream.AGENT in query.streams and not is_chosen

    @property
    def folds(self) -> bool:
        """Return whether equal lines of several ranks become one line of text."""
        if self.form != "text" or self.dedup is not None:
            return self.form == "text" and self.dedup is True
        ranks = self.query.ranks
        writers = self.job.world_size if ranks is None else len(ranks)
        return writers >= LEAST_WRITERS and self.prefix != "none"


def build_request(named: Named, wanted: Mapping[str, Any]) -> Request:
    """Check the options of `logs`, by parameter name, against the job. Raises UsageError."""
    job = named.job
    nodes = named.nodes if wanted["nodes"] is None else frozenset(parse_hostlist(wanted["nodes"]))
    streams = options.choose_streams(wanted["streams"])
    catalogue = job.catalogue(nodes, batch=streams is None)
    attempt = named.attempt if wanted["attempt"] is None else wanted["attempt"]
    attempts = choose_attempts(job.title, catalogue.attempts(), attempt)
    zone = None if wanted["tz"] is None else parse_zone(wanted["tz"])
    query = _query(job, nodes, streams, wanted, zone=zone, attempt=max(attempts, default=0))
    has_times = job.record is not None and streams is not None
    is_saved = wanted["target"] is not None
    return Request(
        job=job,
        catalogue=catalogue,
        attempts=tuple(attempts),
        is_chosen=isinstance(attempt, int),
        nodes=nodes,
        query=query,
        tail=_tail(wanted),
        context=wanted["context"],
        form=wanted["form"],
        has_times=has_times,
        timestamps=_times(wanted) if has_times else "none",
        tz=zone,
        prefix=wanted["prefix"],
        dedup=bool(wanted["dedup"]) if is_saved else wanted["dedup"],  # saved lines are data
        highlight=(
            *options.compile_patterns("--highlight", wanted["highlight"]),
            *query.include,
        ),
        interval_s=wanted["interval"],
        exit_status=wanted["exit_status"],
        reads_batch=streams is None,
    )


def _times(wanted: Mapping[str, Any]) -> str:
    """Choose the time of day if lines have a prefix."""
    return wanted["timestamps"] or ("clock" if wanted["prefix"] != "none" else "none")


def _tail(wanted: Mapping[str, Any]) -> int | None:
    """Return how many lines are wanted: all if they are saved, or if a time was given."""
    if wanted["tail"] is None:
        is_bounded = wanted["target"] is not None or wanted["since"] or wanted["until"]
        return None if is_bounded else DEFAULT_TAIL
    return None if wanted["tail"] == "all" else int(wanted["tail"])


def _query(
    job: LogJob,
    nodes: frozenset[str] | None,
    streams: frozenset[Stream] | None,
    wanted: Mapping[str, Any],
    *,
    zone: tzinfo | None,
    attempt: int,
) -> Query:
    if wanted["all_ranks"] and wanted["ranks"] is not None:
        raise UsageError("--rank and --all-ranks cannot be combined", hint="keep one of them")
    ranks = options.choose_ranks(job, ranks=wanted["ranks"], local_ranks=wanted["local_ranks"])
    chosen = (ranks, nodes, wanted["streams"])
    is_chosen = wanted["all_ranks"] or wanted["errors"] or any(c is not None for c in chosen)
    since_us, until_us = (
        options.choose_moment(
            f"--{name}", wanted[name], job=job, attempt=attempt, zone=zone, batch=streams is None
        )
        for name in ("since", "until")
    )
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError("--since is not before --until", hint="choose an earlier --since")
    return Query(
        ranks=ranks,
        streams=streams or STREAMS,
        overview=not is_chosen and job.record is not None,
        errors=wanted["errors"],
        include=options.compile_patterns("--include", wanted["include"]),
        exclude=options.compile_patterns("--exclude", wanted["exclude"]),
        since_us=since_us,
        until_us=until_us,
    )
