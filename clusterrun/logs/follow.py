"""Follow the logs of a running job by looking again and again: inotify sees no remote writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from clusterrun.logs.files import find_line_end, find_log_files, stat_file
from clusterrun.logs.lines import EVERYTHING, LogLine, Selection
from clusterrun.logs.merge import Span, merge_spans, newest_lines
from clusterrun.paths import RunPaths

INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class NewAttempt:
    """The run was started, or started again; what follows is of this attempt."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A node's file was truncated or replaced; reading goes on at its beginning."""

    node: str


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Everything that is there was given; the next look comes after the interval."""


Entry = LogLine | NewAttempt | Gap | Pause


@dataclass(kw_only=True)
class _Place:
    """How far a file was read."""

    inode: int
    offset: int = 0
    size: int = 0


@dataclass(kw_only=True)
class _Attempt:
    """The files of one attempt and how far each was read."""

    paths: RunPaths
    number: int
    nodes: frozenset[str] | None
    places: dict[str, _Place] = field(default_factory=dict)

    def advance(self, *, last: bool) -> tuple[list[Span], list[Gap]]:
        """Find what was written since the last look; the last one takes torn lines too."""
        spans: list[Span] = []
        gaps: list[Gap] = []
        for file in find_log_files(self.paths, self.number, self.nodes):
            found = stat_file(file.path, fresh=last)
            if found is None:
                continue
            place = self.places.setdefault(file.node, _Place(inode=found.st_ino))
            if found.st_ino != place.inode or found.st_size < place.offset:
                gaps.append(Gap(node=file.node))
                place = self.places[file.node] = _Place(inode=found.st_ino)
            if found.st_size == place.size and not last:
                continue
            place.size = found.st_size
            end = place.size if last else find_line_end(file.path, place.offset, place.size)
            if end > place.offset:
                spans.append(Span(file=file, start=place.offset, end=end))
            place.offset = end
        return spans, gaps


def follow(
    paths: RunPaths,
    *,
    ended: Callable[[], bool],
    attempt: int | None = None,
    nodes: frozenset[str] | None = None,
    selection: Selection = EVERYTHING,
    tail: int | None = None,
    interval_s: float = INTERVAL_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Entry]:
    """Yield the last `tail` lines (all for None), then each line as it comes, until the end.

    Without `attempt` it starts at the newest one and goes on to later ones. It ends when
    `ended()` said so before everything was read. Waits for files that are not there yet.
    """
    current = _Attempt(paths=paths, number=attempt or paths.newest_attempt(), nodes=nodes)
    if tail is not None:
        yield from newest_lines(current.advance(last=False)[0], selection, tail)
    while True:
        over = ended()
        newest = paths.newest_attempt()
        superseded = attempt is not None and newest > attempt
        yield from _news(current, selection, last=over or newest > current.number)
        while attempt is None and current.number < newest:
            current = _Attempt(paths=paths, number=current.number + 1, nodes=nodes)
            yield NewAttempt(attempt=current.number)
            yield from _news(current, selection, last=over or newest > current.number)
        if over or superseded:
            return
        yield Pause()
        sleep(interval_s)


def _news(current: _Attempt, selection: Selection, *, last: bool) -> Iterator[Entry]:
    spans, gaps = current.advance(last=last)
    yield from gaps
    yield from merge_spans(spans, selection)
