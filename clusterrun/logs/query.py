"""Which lines of a run are wanted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterrun.logformat.lines import Stream

STREAMS = frozenset({Stream.OUT, Stream.ERR, Stream.LAUNCHER, Stream.AGENT})


@dataclass(frozen=True, kw_only=True)
class Query:
    """A choice of lines; every given condition must hold.

    `ranks` None means all ranks, the launcher and the agents; a set of ranks excludes those two.
    `overview` is rank 0, launcher and agents, and the error lines of every rank; `errors` is error
    lines only. A line is taken if one of `include` matches it and none of `exclude` does.
    Times are in epoch µs; `until_us` is excluded.
    """

    ranks: frozenset[int] | None = None
    streams: frozenset[Stream] = STREAMS
    overview: bool = False
    errors: bool = False
    include: tuple[re.Pattern[bytes], ...] = ()
    exclude: tuple[re.Pattern[bytes], ...] = ()
    since_us: int | None = None
    until_us: int | None = None


EVERYTHING = Query()
OVERVIEW = Query(overview=True)
