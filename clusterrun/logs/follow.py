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

from clusterrun.logformat.lines import LogLine, Stream
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


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Everything available was yielded; the next poll comes after the interval."""


Entry = LogLine | NewAttempt | Joined | Pause


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
    """Yield the last `tail` lines (all for None), then each new line and END record until the end.

    `folded` counts equal lines of many ranks once. Start at `attempt` (default: the newest), and
    continue with later ones unless it `is_chosen`. Stop once `ended()` returned True and everything
    was read. Wait for files that do not exist yet.
    """
    number = attempt or max(catalogue.attempts(), default=0)
    current = _Attempt(catalogue=catalogue, number=number, query=query)
    if tail is not None:
        yield from current.add_new_files()
        past = current.advance(last=False)
        past = [each.without(lambda _, stream: stream is Stream.END) for each in past]
        yield from last_lines(past, query, tail, folded=folded)
    while True:
        has_ended = ended()  # before the files are read: what was written until then is read
        later = [number for number in catalogue.attempts() if number > current.number]
        yield from current.new_lines(last=has_ended or bool(later))
        if is_chosen and later:
            return
        for number in later:
            without_since = replace(query, since_us=None)  # a later attempt is read from its start
            current = _Attempt(catalogue=catalogue, number=number, query=without_since)
            yield NewAttempt(attempt=number)
            yield from current.new_lines(last=has_ended or number < later[-1])
        if has_ended:
            return
        yield Pause()
        sleep(INTERVAL_S if len(current.places) < MANY_FILES else INTERVAL_OF_MANY_S)


@dataclass(kw_only=True)
class _Position:
    """How far a source has been read."""

    source: Source
    offset: int
    size: int = 0
    inode: int = 0  # not known yet


@dataclass(kw_only=True)
class _Attempt:
    """The files of one attempt, and how far each has been read."""

    catalogue: Catalogue
    number: int
    query: Query
    places: list[_Position] = field(default_factory=list)
    _known: set[Path] = field(default_factory=set)
    _held: deque[LogLine] = field(default_factory=deque)

    def new_lines(self, *, last: bool) -> Iterator[LogLine | Joined]:
        """Yield new lines in order; the last poll, or one that finds nothing, holds none back."""
        yield from self.add_new_files()
        stretches = self.advance(last=last)
        lines = merge_sources(stretches)
        if len(self.places) > 1:
            lines = self._in_order(lines, holds=bool(stretches) and not last)
        yield from lines

    def advance(self, *, last: bool) -> list[Source]:
        """Return what was written since the previous poll; if `last`, also an unfinished line."""
        stretches = []
        paths = [place.source.file.path for place in self.places]
        # Take all sizes at about one moment, before any file is read: that keeps lines in order.
        stats = [stat_file(path, fresh=last) for path in paths]
        for place, path, found in zip(self.places, paths, stats, strict=True):
            if found is None:
                continue
            if place.inode not in (0, found.st_ino) or found.st_size < place.offset:
                place.offset = place.size = 0  # it was replaced or truncated: read all of it
            place.inode = found.st_ino
            if found.st_size == place.size and not last:
                continue
            start, place.size = place.offset, found.st_size
            place.offset = place.size if last else find_line_end(path, start, place.size)
            if place.offset > start:
                stretches.append(replace(place.source, start=start, end=place.offset))
        return stretches

    def add_new_files(self) -> Iterator[Joined]:
        """Add the files that have appeared since the last poll, and yield the logs among them."""
        new = [file for file in self.catalogue.files(self.number) if file.path not in self._known]
        for source in sources_of(new, self.query, live=True):
            self.places.append(_Position(source=source, offset=source.start))
        self._known.update(file.path for file in new)
        if logs := tuple(file for file in new if file.kind is not FileKind.ERRORS):
            yield Joined(files=logs)

    def _in_order(self, lines: Iterable[LogLine], *, holds: bool) -> Iterator[LogLine]:
        """Hold the newest lines until the next poll: another node's may belong before them."""
        waiting, held = self._held, deque[LogLine]()
        self._held = held  # filled below; what is left in it waits
        for line in heapq.merge(waiting, lines, key=_time):
            held.append(line)
            while held[0].epoch_us < line.epoch_us - REORDER_US or len(held) > MAX_HELD:
                yield held.popleft()
        while held and not holds:
            yield held.popleft()
