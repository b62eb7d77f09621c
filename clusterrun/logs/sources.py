"""The log files of a run, and what to read for a query: which part of each, and which lines.

Each log has a side file (ERRORS): its error lines, and those of launcher and agent, up to a size.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from clusterrun.errors import ClusterrunError
from clusterrun.logformat.lines import (
    BEFORE_ALL,
    END_LITERAL,
    GAP_LITERAL,
    MAX_HEAD_BYTES,
    RECORDS,
    STAMPED_LINE,
    LogLine,
    Stream,
)
from clusterrun.logformat.literals import Literals, required_literals
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import raise_descriptor_limit
from clusterrun.shared.hostlist import natural_key

MAX_LINE_BYTES = 1024 * 1024  # reached only in damaged files: agents cut lines far earlier
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # to open a FIFO may block
_SPARE_DESCRIPTORS = 64  # for everything else that this process opens
STREAMS = frozenset({Stream.OUT, Stream.ERR, Stream.LAUNCHER, Stream.AGENT})


class FileKind(Enum):
    """The format of a file's lines: PLAIN lines have no stamp, nor a rank."""

    LOG = "log"
    ERRORS = "errors"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """A file of one node's log lines; `ranks` is None if unknown, `log` is an ERRORS file's log."""

    node: str
    path: Path
    kind: FileKind = FileKind.LOG
    ranks: range | None = None
    log: Path | None = None


def find_files(paths: RunPaths, attempt: int, nodes: frozenset[str] | None = None) -> list[LogFile]:
    """List the logs of an attempt (`nodes`: only theirs), then the side files, in natural order."""
    directory = paths.log(attempt, "any").parent  # all nodes' logs are there
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    ranks = read_attempt(paths, attempt).ranks_by_node
    parts = sorted(map(os.path.splitext, names), key=lambda part: natural_key(part[0]))
    return [
        LogFile(
            node=node,
            path=directory / f"{node}{suffix}",
            kind=kind,
            ranks=ranks.get(node),
            log=paths.log(attempt, node) if kind is FileKind.ERRORS else None,
        )
        for kind, suffix in ((FileKind.LOG, ".log"), (FileKind.ERRORS, ".err"))
        for node, extension in parts
        if extension == suffix and (nodes is None or node in nodes)
    ]


def stat_file(path: Path, *, fresh: bool = False) -> os.stat_result | None:
    """Return the stat of a file, None if there is none; `fresh`: not from a cache, as of NFS."""
    try:
        if not fresh:
            return os.stat(path)
        with open(os.open(path, _READ), "rb") as file:  # to open a file, NFS asks the server
            return os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    found = stat_file(path)
    return found.st_size if found else 0


class Catalogue(NamedTuple):
    """The attempts of a job, and the files that one of them has now."""

    attempts: Callable[[], list[int]]
    files: Callable[[int], list[LogFile]]


class OpenFiles(contextlib.AbstractContextManager["OpenFiles"]):
    """Reads from many files, and keeps as many open as the descriptor limit allows.

    On a network file system each open asks the server. The soft limit is raised while this object
    is in use; files beyond it are opened for each read.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = raise_descriptor_limit() - _SPARE_DESCRIPTORS

    def __exit__(self, *_: object) -> None:
        for path in list(self._descriptors):
            self.close(path)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Read up to `size` bytes; b"" if there are none, or no file. Raises ClusterrunError."""
        try:
            descriptor = self._descriptors.get(path)
            if descriptor is None:  # 0 is valid
                descriptor = self._descriptors[path] = os.open(path, _READ)
            found = b""  # some file systems return less before the end
            while more := os.pread(descriptor, size - len(found), offset + len(found)):
                found += more
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            if len(self._descriptors) > self._room:
                self.close(path)
        return found

    def close(self, path: Path) -> None:
        """Close a file that is no longer needed."""
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def find_line_end(path: Path, start: int, end: int) -> int:
    """Return where the last whole line between two offsets ends; `start` if there is none."""
    with OpenFiles() as files:
        for size in (64 * 1024, MAX_LINE_BYTES):  # nearly always, the first one is enough
            begin = max(start, end - size)
            newline = files.read(path, begin, end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
    return end if end - start > MAX_LINE_BYTES else start  # too long for a line: read it in parts


def _unreadable(path: Path, error: OSError) -> ClusterrunError:
    return ClusterrunError(f"cannot read {path}", cause=error.strerror or str(error))


@dataclass(frozen=True, kw_only=True)
class Query:
    """A choice of lines; every given condition must hold."""

    ranks: frozenset[int] | None = None  # None: all, launcher and agents; a set excludes those two
    streams: frozenset[Stream] = STREAMS
    overview: bool = False  # rank 0, launcher and agents, and the error lines of every rank
    errors: bool = False  # error lines only
    include: tuple[re.Pattern[bytes], ...] = ()  # one must match, if there are any
    exclude: tuple[re.Pattern[bytes], ...] = ()  # none may match
    since_us: int | None = None  # in epoch µs
    until_us: int | None = None  # in epoch µs, excluded


EVERYTHING = Query()
OVERVIEW = Query(overview=True)

Takes = Callable[["int | None", Stream], bool]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stretch of a file from the beginning of a line, and which of its lines are wanted."""

    file: LogFile
    start: int
    end: int
    takes: Takes = lambda rank, stream: True  # decides by rank and stream
    wants: Callable[[LogLine], bool] | None = None  # decides on the lines that are taken
    literals: tuple[bytes, ...] = ()  # each wanted line contains one of them, if there are any
    only_errors: bool = False  # of a side file: no lines of launcher and agent without an error

    def without(self, is_left_out: Takes) -> Source:
        """Return this source without some ranks or streams."""
        takes = self.takes
        return replace(self, takes=lambda *line: not is_left_out(*line) and takes(*line))


def sources_of(files: Iterable[LogFile], query: Query, *, live: bool = False) -> list[Source]:
    """Choose what to read of some files, up to their current ends.

    Error lines come from the side files; a missing one counts as empty. `live` includes files
    without wanted lines yet, and end records. Raises ClusterrunError for an unreadable file.
    """
    chosen = []
    files = list(files)
    searched = required_literals(query.include)
    sides = {file.node: file for file in files if file.kind is FileKind.ERRORS}
    for file, takes in _chosen_files(files, query, live=live):
        start, end = 0, file_size(file.path)
        if query.until_us is not None:
            end = seek_time(file, query.until_us, end)
        if query.since_us is not None:
            start = seek_time(file, query.since_us, end)
        if start >= end and not live:
            continue
        source = Source(file=file, start=start, end=end, takes=takes, only_errors=query.errors)
        literals = _literals(file, sides, searched, live=live)
        chosen.append(replace(source, wants=_wants(query), literals=literals))
    return chosen


def _chosen_files(
    files: Iterable[LogFile], query: Query, *, live: bool
) -> Iterator[tuple[LogFile, Takes]]:
    """Yield the files to read, each with which of its lines are taken."""
    takes = _takes(query, live=live)
    for file in sorted(files, key=lambda file: natural_key(file.node)):
        is_side, ranks = file.kind is FileKind.ERRORS, file.ranks
        if query.ranks is not None and ranks is not None and query.ranks.isdisjoint(ranks):
            continue
        if not query.overview:
            if is_side == query.errors:  # a search for errors reads side files only
                yield file, takes
        elif is_side:  # also the lines of launcher and agent; those of rank 0 are in the log
            yield file, lambda rank, stream: rank != 0 and takes(rank, stream)
        elif ranks is None or 0 in ranks:
            yield file, lambda rank, stream: rank == 0 and takes(rank, stream)


def _takes(query: Query, *, live: bool) -> Takes:
    """Return what decides by rank and stream whether a query asks for a line."""
    ranks, streams = query.ranks, query.streams

    def takes(rank: int | None, stream: Stream) -> bool:
        if stream is Stream.END:
            return live  # only `follow` needs the end of a log
        if ranks is not None and rank not in ranks:
            return False
        return stream is Stream.GAP or stream in streams

    return takes


def _wants(query: Query) -> Callable[[LogLine], bool] | None:
    """Return what decides by text whether a query asks for a line; None if it asks for any text."""
    if not query.include and not query.exclude:
        return None
    include = [pattern.search for pattern in query.include]
    exclude = [pattern.search for pattern in query.exclude]

    def wants(line: LogLine) -> bool:
        if line.stream in RECORDS:  # they are always shown
            return True
        found = not include or any(search(line.text) for search in include)
        return found and not any(search(line.text) for search in exclude)

    return wants


def _literals(
    log: LogFile, sides: Mapping[str, LogFile], searched: Literals, *, live: bool
) -> Literals:
    """Return the literals to search for, with those of the records that are always shown.

    Leave out gap records if the side file has none: searching for such a short literal takes four
    times as long as for a word. Return () for a side file: it may lack the end of a line.
    """
    if not searched or log.kind is FileKind.ERRORS:
        return ()
    if live:
        return (*searched, GAP_LITERAL, END_LITERAL)
    side = sides.get(log.node)
    has_none = side is not None and GAP_LITERAL not in _whole(side)
    return searched if has_none else (*searched, GAP_LITERAL)


_BLOCK_BYTES = 4 * 1024
_SIDE_BYTES = 1024 * 1024  # more than a side file has
_ANY_LINE = re.compile(rb"^", re.MULTILINE)
_LEFT_OUT = re.compile(rb"^[0-9]{16} - g - [0-9]+ x ", re.MULTILINE)


def seek_time(file: LogFile, epoch_us: int, end: int) -> int:
    """Return the offset of the first line at or after a time, at most `end`."""
    stamp = b"%016d" % min(max(epoch_us, 0), 10**16 - 1)
    with OpenFiles() as files:

        def first_stamp_from(offset: int) -> bytes:
            # If no line follows the offset, it is late enough.
            return next((found for _, found in line_starts(files, file, offset, end)), stamp)

        blocks = range(0, end, _BLOCK_BYTES)
        later = bisect_left(blocks, stamp, key=first_stamp_from)
        # The line is the first of this block, or in the one before it.
        lines = line_starts(files, file, max(0, later - 1) * _BLOCK_BYTES, end)
        return next((offset for offset, found in lines if found >= stamp), end)


def line_starts(
    files: OpenFiles, file: LogFile, start: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield offset and stamp of each line with a head; of a PLAIN file, all, with BEFORE_ALL."""
    pattern = _ANY_LINE if file.kind is FileKind.PLAIN else STAMPED_LINE
    while start < end:
        size = min(_BLOCK_BYTES, end - start)
        before = min(start, 1)  # also the byte before: a line begins after a newline
        data = files.read(file.path, start - before, before + size + MAX_HEAD_BYTES)
        for head in pattern.finditer(data, before):
            if head.start() >= before + size:
                break
            yield start - before + head.start(), head[1] if head.lastindex else BEFORE_ALL
        if len(data) <= before:
            return
        start += size


def has_left_out(side: LogFile) -> bool:
    """Return whether a side file had no room for all error lines."""
    return _LEFT_OUT.search(_whole(side)) is not None


def _whole(side: LogFile) -> bytes:
    with OpenFiles() as files:
        return files.read(side.path, 0, _SIDE_BYTES)
