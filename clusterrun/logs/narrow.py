"""Narrow what is read for a search to where it may match, on several processors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clusterrun.logs.files import Kind, OpenFiles
from clusterrun.logs.lines import MAX_HEAD_BYTES, find_stamped, last_stamped
from clusterrun.logs.scan import Literals, holds_any
from clusterrun.logs.sources import Source, Stretch

BIG_BYTES = 256 * 1024 * 1024  # less is read sooner than processes are started
_PIECE_BYTES = 64 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024
_MAX_BYTES = 8 * 1024 * 1024  # of damage without the beginning of a line
_MAX_PROCESSES = 8


class _Piece(NamedTuple):
    """A part of a source: the lines that begin in it, each with those without head behind it."""

    number: int
    path: Path
    is_plain: bool
    start: int
    end: int
    source_end: int
    literals: Literals


Tell = Callable[[int, int], None]


def say_nothing(done_bytes: int, total_bytes: int) -> None:
    """Hear how far a search is, and keep it."""


def narrow(sources: Iterable[Source], tell: Tell = say_nothing) -> list[Source]:
    """Find where in big files lines with the literals of a search are; all else stays as it is.

    `tell` hears how many bytes were searched, and of how many. Raises ClusterrunError for a file
    that can't be read.
    """
    sources = list(sources)
    pieces = [piece for i, source in enumerate(sources) for piece in _pieces(i, source)]
    processes = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES, len(pieces))
    total = sum(piece.end - piece.start for piece in pieces)
    has_threads = threading.active_count() > 1  # which forks would not take along
    if total <= BIG_BYTES or processes < 2 or has_threads:
        return sources
    try:
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer=_ignore_interrupts
        ) as pool:
            found: list[list[Stretch]] = []
            done = 0
            for piece, stretches in zip(pieces, pool.map(_search, pieces), strict=True):
                found.append(stretches)
                done += piece.end - piece.start
                tell(done, total)
    except (OSError, ImportError, BrokenProcessPool):
        return sources  # this process finds the same, later
    return _narrowed(sources, pieces, found)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool


def _pieces(number: int, source: Source) -> list[_Piece]:
    if not source.literals or source.stretches is not None:
        return []
    return [
        _Piece(
            number=number,
            path=source.file.path,
            is_plain=source.file.kind is Kind.PLAIN,
            start=start,
            end=min(start + _PIECE_BYTES, source.end),
            source_end=source.end,
            literals=source.literals,
        )
        for start in range(source.start, source.end, _PIECE_BYTES)
    ]


def _narrowed(
    sources: list[Source], pieces: list[_Piece], found: list[list[Stretch]]
) -> list[Source]:
    stretches: dict[int, list[Stretch]] = {piece.number: [] for piece in pieces}
    for piece, some in zip(pieces, found, strict=True):
        for start, end in some:
            _append(stretches[piece.number], start, end)
    return [
        replace(source, stretches=tuple(stretches[i])) if i in stretches else source
        for i, source in enumerate(sources)
        if stretches.get(i) != []
    ]


def _append(stretches: list[Stretch], start: int, end: int) -> None:
    if stretches and stretches[-1][1] == start:
        start = stretches.pop()[0]
    stretches.append((start, end))


def _search(piece: _Piece) -> list[Stretch]:
    """Find the stretches of a piece that hold a literal, each from a line with a head on."""
    found: list[Stretch] = []
    with OpenFiles(1) as files:
        begin = _border(files, piece, piece.start)
        end = _border(files, piece, piece.end)
        position, rest = begin, b""
        while position < end:
            block = files.read(piece.path, position, min(_BLOCK_BYTES, end - position))
            if not block:
                break
            data = rest + block
            begin = position - len(rest)
            position += len(block)
            cut = data.rfind(b"\n") + 1
            if not piece.is_plain:
                cut = last_stamped(data[:cut])
            if position >= end or (cut <= 0 and len(data) > _MAX_BYTES):
                cut = len(data)
            rest = data[max(cut, 0) :]
            if cut > 0 and holds_any(data[:cut], piece.literals):
                _append(found, begin, begin + cut)
    return found


def _border(files: OpenFiles, piece: _Piece, offset: int) -> int:
    """Find the first line with a head that begins at or after an offset; the source's end else.

    In damage without such a line, that is too long to look through, it is any place.
    """
    if offset == 0 or offset >= piece.source_end:
        return offset
    position, data = offset - 1, b""
    while position < piece.source_end:
        block = files.read(piece.path, position, min(_BLOCK_BYTES, piece.source_end - position))
        if not block:
            break
        data += block
        position += len(block)
        line = data.find(b"\n") + 1
        if line and not piece.is_plain:
            line = find_stamped(data, line)
        if 0 < line <= len(data) - MAX_HEAD_BYTES or (line > 0 and position >= piece.source_end):
            return offset - 1 + line
        if len(data) > _MAX_BYTES:
            return offset
    return piece.source_end
