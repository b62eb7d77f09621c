"""Read one node's log file in blocks, forwards or backwards, with no descriptor kept open.

Each block is its own open, pread, close: a thousand files need no thousand descriptors, and NFS
promises fresh data only to those who open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import ClusterrunError
from clusterrun.hostlist import fold_hostlist
from clusterrun.logs.lines import LogLine, parse_line
from clusterrun.paths import RunPaths

BLOCK_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024  # of a damaged file: agents cut lines long before


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """The log file of one node."""

    node: str
    path: Path


def find_log_files(
    paths: RunPaths, attempt: int, nodes: frozenset[str] | None = None
) -> list[LogFile]:
    """List the log files of an attempt, or of some of its nodes, node2 before node10."""
    directory = paths.log(attempt, "any").parent
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    found = [name.removesuffix(".log") for name in names if name.endswith(".log")]
    wanted = sorted((n for n in found if nodes is None or n in nodes), key=natural_key)
    return [LogFile(node=node, path=paths.log(attempt, node)) for node in wanted]


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Order names as people count: node2 before node10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(p) if i % 2 and len(p) < 19 else p for i, p in enumerate(parts)], name


def fold_nodes(files: list[LogFile]) -> str:
    """Name the nodes of some files in Slurm's short form."""
    return fold_hostlist(file.node for file in files)


def stat_file(path: Path, *, fresh: bool = False) -> os.stat_result | None:
    """Look at a file; None when it is not there.

    `fresh` opens it first, as an NFS client may answer stat from its cache for seconds.
    """
    try:
        if not fresh:
            return path.stat()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def file_size(path: Path) -> int:
    """Measure a file in bytes; 0 when it is not there."""
    found = stat_file(path)
    return found.st_size if found else 0


def read_forward(
    file: LogFile, *, start: int, end: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[LogLine]:
    """Yield the lines between two offsets; a last line without newline is one too."""
    position, offset, rest, near_us = start, start, b"", 0
    while position < end and (
        block := _read_block(file.path, position, min(block_bytes, end - position))
    ):
        position += len(block)
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > MAX_LINE_BYTES or position >= end:
            lines, rest = [*lines, rest], b""
        for raw in lines:
            if raw:
                line = parse_line(raw, node=file.node, offset=offset, near_us=near_us)
                near_us = line.epoch_us
                yield line
            offset += len(raw) + 1
        offset = position - len(rest)


def read_backward(
    file: LogFile, *, start: int, end: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[LogLine]:
    """Yield the lines between two offsets, newest first."""
    position, rest, near_us = end, b"", 0
    while position > start:
        size = min(block_bytes, position - start)
        block = _read_block(file.path, position - size, size)
        if len(block) < size:
            return  # it was truncated under our hands
        position -= size
        cursor = position + len(block) + len(rest)
        rest, *lines = (block + rest).split(b"\n")
        if position == start or len(rest) > MAX_LINE_BYTES:
            lines, rest = [rest, *lines], b""
        for raw in reversed(lines):
            cursor -= len(raw)
            if raw:
                line = parse_line(raw, node=file.node, offset=cursor, near_us=near_us)
                near_us = line.epoch_us
                yield line
            cursor -= 1


def find_line_end(path: Path, start: int, end: int) -> int:
    """Find where the last whole line between two offsets ends; `start` when there is none yet.

    A stretch that is too long for a line counts as whole, so that a reader gets on.
    """
    position = end
    while position > start:
        size = min(BLOCK_BYTES, position - start)
        block = _read_block(path, position - size, size)
        newline = block.rfind(b"\n")
        if newline >= 0:
            return position - size + newline + 1
        position -= size
        if end - position > MAX_LINE_BYTES:
            return end
    return start


def _read_block(path: Path, offset: int, size: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> ClusterrunError:
    return ClusterrunError(f"cannot read {path}", cause=error.strerror or str(error))
