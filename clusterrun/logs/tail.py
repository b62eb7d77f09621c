"""Choose the last lines, and for an overview also earlier error lines: the cause may be old."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from itertools import chain, islice

from clusterrun.logformat.lines import LogLine
from clusterrun.logs.dedup import LineCount
from clusterrun.logs.merge import Report, merge_rounds, report_nothing
from clusterrun.logs.newest import find_newest
from clusterrun.logs.query import Query
from clusterrun.logs.sources import Source, errors_of

_AT_ONCE = 256


class Cut(Flag):
    """What a tail leaves out."""

    NOTHING = 0
    LINES = auto()
    ERRORS = auto()


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last lines in batches; `errors` are the error lines before the first of them."""

    rounds: Iterable[Sequence[LogLine]]
    errors: Sequence[LogLine] = ()
    cut: Cut = Cut.NOTHING

    def __iter__(self) -> Iterator[LogLine]:
        return chain(self.errors, chain.from_iterable(self.rounds))


def last_lines(
    sources: Iterable[Source],
    query: Query,
    count: int | None,
    *,
    folded: bool = False,
    report: Report = report_nothing,
) -> Tail:
    """Return the last `count` lines (None: all) of the sources of a query.

    In an overview up to half of them are the newest error lines of all ranks.
    """
    sources = list(sources)
    if count is None:
        return Tail(rounds=merge_rounds(sources, report))
    found = find_newest(sources, count, folded=folded, report=report)
    if not isinstance(found.lines, list):
        cut = Cut.NOTHING if found.is_all else Cut.LINES | Cut.ERRORS
        rest = iter(found.lines)
        return Tail(rounds=iter(lambda: list(islice(rest, _AT_ONCE)), []), cut=cut)
    if found.is_all or not query.overview:
        return Tail(rounds=[found.lines], cut=Cut.NOTHING if found.is_all else Cut.LINES)
    newest_errors = find_newest(errors_of(sources, query), count // 2, folded=folded)
    errors = list(newest_errors.lines)
    lines = _with_room(found.lines, errors, count, folded=folded)
    cut = Cut.LINES if newest_errors.is_all else Cut.LINES | Cut.ERRORS
    return Tail(rounds=[lines], errors=_before(lines, errors) if lines else (), cut=cut)


def _with_room(
    lines: list[LogLine], errors: list[LogLine], count: int, *, folded: bool
) -> list[LogLine]:
    """Drop the oldest of the last lines if older error lines need room.

    All error lines among the rest are also in `errors`.
    """
    if not _before(lines, errors):
        return lines
    kept = set(map(_place, errors))
    room = count - _count(errors, folded=folded)
    others = LineCount(folded=folded)
    for start in range(len(lines), 0, -1):
        line = lines[start - 1]
        if _place(line) not in kept:
            others.add(line)
            if others.count > room:
                return lines[start:]
    return lines


def _before(lines: list[LogLine], errors: list[LogLine]) -> list[LogLine]:
    """Return the error lines that are older than all of `lines`."""
    shown = set(map(_place, lines))
    return [e for e in errors if e.epoch_us <= lines[0].epoch_us and _place(e) not in shown]


def _place(line: LogLine) -> tuple[str, int]:
    return line.node, line.offset


def _count(lines: list[LogLine], *, folded: bool) -> int:
    counted = LineCount(folded=folded)
    for line in reversed(lines):
        counted.add(line)
    return counted.count
