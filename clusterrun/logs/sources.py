"""Decide what to read for a query: which files, which part of each, and which lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun.logformat.lines import (
    END_LITERAL,
    GAP_LITERAL,
    MAX_HEAD_BYTES,
    RECORDS,
    LogLine,
    Stream,
    find_stamped,
)
from clusterrun.logformat.literals import Literals, required_literals
from clusterrun.logs.files import FileKind, LogFile, OpenFiles, file_size
from clusterrun.shared.hostlist import natural_key

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

Takes = Callable[["int | None", Stream], bool]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stretch of a file from the beginning of a line, and which of its lines are wanted.

    `takes` decides by rank and stream; `wants` decides on the remaining lines. If `literals` is not
    empty, each wanted line contains one of them. `only_errors`: of a side file, leave out the lines
    of launcher and agent that report no error.
    """

    file: LogFile
    start: int
    end: int
    takes: Takes = lambda rank, stream: True
    wants: Callable[[LogLine], bool] | None = None
    literals: tuple[bytes, ...] = ()
    only_errors: bool = False

    def without(self, is_left_out: Takes) -> Source:
        """Return this source without some ranks or streams."""
        takes = self.takes
        return replace(self, takes=lambda *line: not is_left_out(*line) and takes(*line))


def sources_of(
    files: Iterable[LogFile], query: Query, *, ends: bool = False, live: bool = False
) -> list[Source]:
    """Choose what to read of some files, up to their current ends.

    Error lines come from the side files; a missing one counts as empty. `ends` includes the logs'
    end records; `live` includes files without wanted lines yet. Raises ClusterrunError for a file
    that can't be read.
    """
    chosen = []
    files = list(files)
    searched = required_literals(query.include)
    sides = {file.node: file for file in files if file.kind is FileKind.ERRORS}
    for file, takes in _parts(files, query, ends=ends):
        end = file_size(file.path)
        end = end if query.until_us is None else seek_time(file, query.until_us, end)
        start = 0 if query.since_us is None else seek_time(file, query.since_us, end)
        if start >= end and not live:
            continue
        chosen.append(
            Source(
                file=file,
                start=start,
                end=end,
                takes=takes,
                wants=_wants(query),
                literals=_literals(file, sides, searched, ends=ends),
                only_errors=query.errors,
            )
        )
    return chosen


def errors_of(sources: Iterable[Source], query: Query) -> list[Source]:
    """Return the sources of an overview reduced to the error lines of all ranks."""
    streams = query.streams
    return [
        replace(source, only_errors=True, takes=lambda rank, stream: stream in streams)
        for source in sources
        if source.file.kind is FileKind.ERRORS
    ]


def _parts(
    files: Iterable[LogFile], query: Query, *, ends: bool
) -> Iterator[tuple[LogFile, Takes]]:
    """Yield the files to read, each with which of its lines are taken."""
    takes = _takes(query, ends=ends)
    for file in sorted(files, key=lambda file: natural_key(file.node)):
        is_side, ranks = file.kind is FileKind.ERRORS, file.ranks
        if not (query.ranks is None or ranks is None or not query.ranks.isdisjoint(ranks)):
            continue
        if not query.overview and is_side is query.errors:
            yield file, takes
        elif query.overview and is_side:
            yield file, lambda rank, stream: rank != 0 and takes(rank, stream)
        elif query.overview and (ranks is None or 0 in ranks):
            yield file, lambda rank, stream: rank == 0 and takes(rank, stream)


def _takes(query: Query, *, ends: bool) -> Takes:
    ranks, streams = query.ranks, query.streams

    def takes(rank: int | None, stream: Stream) -> bool:
        if stream is Stream.END:
            return ends
        if ranks is not None and rank not in ranks:
            return False
        return stream is Stream.GAP or stream in streams

    return takes


def _wants(query: Query) -> Callable[[LogLine], bool] | None:
    if not query.include and not query.exclude:
        return None
    include = [pattern.search for pattern in query.include]
    exclude = [pattern.search for pattern in query.exclude]

    def wants(line: LogLine) -> bool:
        if line.stream in RECORDS:
            return True
        found = not include or any(search(line.text) for search in include)
        return found and not any(search(line.text) for search in exclude)

    return wants


def _literals(
    log: LogFile, sides: Mapping[str, LogFile], searched: Literals, *, ends: bool
) -> Literals:
    """Return the literals to search for, with those of the records that are always shown.

    Leave out gap records if the side file has none: searching for such a short literal takes four
    times as long as for a word. A side file itself may lack a line's end.
    """
    if not searched or log.kind is FileKind.ERRORS:
        return ()
    side = sides.get(log.node)
    has_none = not ends and side is not None and GAP_LITERAL not in _whole(side)
    ends_too = (END_LITERAL,) if ends else ()
    return (*searched, *ends_too) if has_none else (*searched, GAP_LITERAL, *ends_too)


_LOOK_BYTES = 4 * 1024
_SIDE_BYTES = 1024 * 1024  # more than a side file has
_LEFT_OUT = re.compile(rb"^[0-9]{16} - g - [0-9]+ x ", re.MULTILINE)


def seek_time(file: LogFile, epoch_us: int, end: int) -> int:
    """Return the offset of the first line at or after a time, at most `end`."""
    stamp = b"%016d" % min(max(epoch_us, 0), 10**16 - 1)
    low, high = 0, end
    reach = high  # no line with a head begins from here to `high`
    with OpenFiles(1) as files:
        while reach - low > _LOOK_BYTES:
            middle = (low + reach) // 2
            found = next(_stamped_lines(files, file.path, middle, reach), None)
            if found is None:
                reach = middle
            elif found[1] < stamp:
                low = found[0] + 1
            else:
                high, reach = found[0], middle
        lines = _stamped_lines(files, file.path, low, reach)
        return next((offset for offset, found_stamp in lines if found_stamp >= stamp), high)


def _stamped_lines(
    files: OpenFiles, path: Path, start: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and stamp of each line with a head between two offsets."""
    while start < end:
        size = min(_LOOK_BYTES, end - start)
        before = 1 if start else 0  # a line begins after a newline
        look = files.read(path, start - before, before + size + MAX_HEAD_BYTES)
        base = start - before
        at = look.find(b"\n") + 1 if before else 0
        while (at or not before) and (at := find_stamped(look, at)) >= 0:
            if at - before >= size:
                break
            yield base + at, look[at : at + 16]
            at = look.find(b"\n", at) + 1
            if not at:
                break
        if len(look) <= before:
            return
        start += size


def has_left_out(side: LogFile) -> bool:
    """Return whether a side file had no room for all error lines."""
    return _LEFT_OUT.search(_whole(side)) is not None


def _whole(side: LogFile) -> bytes:
    with OpenFiles(1) as files:
        return files.read(side.path, 0, _SIDE_BYTES)
