"""Follow the logs of a running job by polling: inotify does not see writes from other nodes."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from clusterrun.logformat.lines import LogLine, Stream, parse_end
from clusterrun.logs.merge import last_lines, merge_sources
from clusterrun.logs.sources import (
    EVERYTHING,
    Catalogue,
    FileKind,
    LogFile,
    Query,
    Source,
    find_line_end,
    sources_of,
    stat_file,
)

INTERVAL_S = 0.2
INTERVAL_OF_MANY_S = 1.0  # each poll asks the file server once per file
MANY_FILES = 200
REORDER_US = 100_000  # agents forward ten times a second: new lines may be this old
MAX_HELD = 10_000
_time = attrgetter("epoch_us")


class NewAttempt(NamedTuple):
    """The run was started again; the following lines are from this attempt."""

    attempt: int


class Joined(NamedTuple):
    """Logs of these nodes have appeared since the last poll."""

    files: tuple[LogFile, ...]


class Left(NamedTuple):
    """A node's log is complete; its agent ended with this status."""

    node: str
    code: int


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Everything available was yielded; the next poll comes after the interval."""


Entry = LogLine | NewAttempt | Joined | Left | Pause


def follow(
    catalogue: Catalogue,
    *,
    ended: Callable[[], bool],
    query: Query = EVERYTHING,
    attempt: int | None = None,
    is_chosen: bool = False,
    tail: int | None = None,
    folded: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Entry]:
    """Yield the last `tail` lines (all for None), then each new line until the end.

    `folded` counts equal lines of many ranks once. Start at `attempt` (default: the newest), and
    continue with later ones unless it `is_chosen`. Stop once `ended()` returned True and everything
    was read. Wait for files that do not exist yet.
    """
    number = attempt or max(catalogue.attempts(), default=0)
    current = _Attempt(catalogue=catalogue, number=number, query=query)
    if tail is not None:
        stretches, news = current.look(last=False)
        yield from news
        past = [each.without(lambda _, stream: stream is Stream.END) for each in stretches]
        yield from _entries(last_lines(past, query, tail, folded=folded))
    while True:
        over = ended()
        later = [number for number in catalogue.attempts() if number > current.number]
        superseded = is_chosen and bool(later)
        yield from current.news(last=over or bool(later))
        for number in () if is_chosen else later:
            following = replace(query, since_us=None)
            current = _Attempt(catalogue=catalogue, number=number, query=following)
            yield NewAttempt(attempt=number)
            yield from current.news(last=over or number < later[-1])
        if over or superseded:
            return
        yield Pause()
        sleep(INTERVAL_S if len(current.places) < MANY_FILES else INTERVAL_OF_MANY_S)


@dataclass(kw_only=True)
class _Position:
    """How far a source has been read."""

    source: Source
    inode: int
    offset: int
    size: int = 0


@dataclass(kw_only=True)
class _Attempt:
    """The files of one attempt, and how far each has been read."""

    catalogue: Catalogue
    number: int
    query: Query
    places: list[_Position] = field(default_factory=list)
    _known: set[Path] = field(default_factory=set)
    _held: deque[LogLine] = field(default_factory=deque)

    def news(self, *, last: bool) -> Iterator[Entry]:
        """Yield what was written since the last poll, in order; the last holds back no lines."""
        stretches, news = self.look(last=last)
        yield from news
        lines = merge_sources(stretches)
        if len(self.places) > 1:
            lines = self._in_order(lines, holds=bool(stretches) and not last)
        yield from _entries(lines)

    def look(self, *, last: bool) -> tuple[list[Source], list[Entry]]:
        """Find what was written since the last poll; the last poll also takes torn lines."""
        joined = self._join()
        news: list[Entry] = [Joined(files=joined)] if joined else []
        stretches = []
        paths = dict.fromkeys(place.source.file.path for place in self.places)
        stats = {path: stat_file(path, fresh=last) for path in paths}  # before any file is read
        for place in self.places:
            path = place.source.file.path
            if (found := stats[path]) is None:
                continue
            if found.st_ino != place.inode or found.st_size < place.offset:
                # It was replaced or truncated: read it from its beginning.
                place.inode, place.offset, place.size = found.st_ino, 0, 0
            if found.st_size == place.size and not last:
                continue
            start, place.size = place.offset, found.st_size
            place.offset = place.size if last else find_line_end(path, start, place.size)
            if place.offset > start:
                stretches.append(replace(place.source, start=start, end=place.offset))
        return stretches, news

    def _join(self) -> tuple[LogFile, ...]:
        """Add the files that have appeared."""
        files = self.catalogue.files(self.number)
        changed = {file.node for file in files if file.path not in self._known}
        if not changed:
            return ()
        candidates = [file for file in files if file.node in changed]
        for source in sources_of(candidates, self.query, live=True):
            if source.file.path not in self._known:
                found = stat_file(source.file.path)
                inode = found.st_ino if found else 0
                self.places.append(_Position(source=source, inode=inode, offset=source.start))
        new = [file for file in candidates if file.path not in self._known]
        self._known.update(file.path for file in new)
        return tuple(file for file in new if file.kind is not FileKind.ERRORS)

    def _in_order(self, lines: Iterable[LogLine], *, holds: bool) -> Iterator[LogLine]:
        """Hold the newest lines until the next poll: another node's may belong before them."""
        held, waiting = self._held, deque(self._held)
        held.clear()
        for line in heapq.merge(waiting, lines, key=_time):
            held.append(line)
            while held[0].epoch_us < line.epoch_us - REORDER_US or len(held) > MAX_HELD:
                yield held.popleft()
        while held and not holds:
            yield held.popleft()


def _entries(lines: Iterable[LogLine]) -> Iterator[LogLine | Left]:
    for line in lines:
        if line.stream is Stream.END:
            yield Left(node=line.node, code=parse_end(line.text))
        else:
            yield line
