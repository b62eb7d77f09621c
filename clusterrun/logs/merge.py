"""Merge the logs of all nodes by time: all lines, or the newest of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from clusterrun.logs.files import (
    LogFile,
    file_size,
    find_log_files,
    natural_key,
    read_backward,
    read_forward,
)
from clusterrun.logs.lines import EVERYTHING, LogLine, Selection
from clusterrun.paths import RunPaths

_BUDGET_BYTES = 32 * 1024 * 1024  # of blocks in memory, over all files
_MIN_BLOCK_BYTES = 4 * 1024
_MAX_BLOCK_BYTES = 1024 * 1024
_OLD_LINES = 100  # in a row; an agent's own lines may lie behind later ones of the ranks


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a node's log file, in bytes."""

    file: LogFile
    start: int
    end: int


def read_merged(
    paths: RunPaths,
    attempt: int,
    *,
    nodes: frozenset[str] | None = None,
    selection: Selection = EVERYTHING,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of an attempt by (time, node, place in the file), or the last `tail`.

    What is written while it reads is not read. Raises ClusterrunError for a file that can't be.
    """
    spans = [
        Span(file=file, start=0, end=file_size(file.path))
        for file in find_log_files(paths, attempt, nodes)
    ]
    if tail is None:
        return merge_spans(spans, selection)
    return iter(newest_lines(spans, selection, tail))


def merge_spans(spans: Iterable[Span], selection: Selection) -> Iterator[LogLine]:
    """Yield the selected lines of all spans in order; memory is bounded over all of them."""
    ordered = sorted(spans, key=lambda span: natural_key(span.file.node))
    rank_of = {span.file.node: place for place, span in enumerate(ordered)}
    room = _BUDGET_BYTES // max(len(ordered), 1)
    block_bytes = min(max(room, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    sources = (
        read_forward(span.file, start=span.start, end=span.end, block_bytes=block_bytes)
        for span in ordered
    )
    return heapq.merge(
        *(filter(selection.wants, source) for source in sources),
        key=lambda line: (line.epoch_us, rank_of[line.node], line.offset),
    )


def newest_lines(spans: Iterable[Span], selection: Selection, count: int) -> list[LogLine]:
    """Find the last `count` selected lines of all spans, each read from its end.

    A file is left after a stretch of lines that are older than all that are kept, so that files
    without selected lines are not read to their beginning once the count is reached.
    """
    kept: list[tuple[tuple[int, int, int], LogLine]] = []
    for place, span in enumerate(sorted(spans, key=lambda span: natural_key(span.file.node))):
        old_lines = 0
        for line in read_backward(span.file, start=span.start, end=span.end):
            key = (line.epoch_us, place, line.offset)
            is_full = len(kept) >= count
            is_old = is_full and (not kept or key < kept[0][0])
            old_lines = old_lines + 1 if is_old else 0
            if old_lines > _OLD_LINES:
                break
            if is_old or not selection.wants(line):
                continue
            heapq.heappush(kept, (key, line))
            if is_full:
                heapq.heappop(kept)
    return [line for _, line in sorted(kept, key=lambda entry: entry[0])]
