"""Which lines of a run are wanted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterrun.logformat.lines import Stream

STREAMS = frozenset({Stream.OUT, Stream.ERR, Stream.LAUNCHER, Stream.AGENT})


@dataclass(frozen=True, kw_only=True)
class Query:
    """A choice of lines; every part that is given must hold.

    `ranks` None means all ranks, the launcher and the agents; a set of ranks leaves those two out.
    `overview` is rank 0, launcher and agents, and the error lines of every rank; `errors` is error
    lines alone. A line is taken when one of `include` is found in it and none of `exclude`.
    Times are in epoch µs, `until_us` not included.
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
