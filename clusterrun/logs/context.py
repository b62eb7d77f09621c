"""Show lines with their neighbours: what the same rank, launcher or agent wrote around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clusterrun.logformat.lines import LogLine, Stream, parse_line, pattern_of_lines
from clusterrun.logs.files import LogFile, read_once

_STEP_BYTES = 64 * 1024
_REACH_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Break:
    """A mark between lines that are not neighbours."""


BREAK: Final = Break()

Writer = tuple[str, "int | None", "Stream | None"]


def writer_of(line: LogLine) -> Writer:
    """Return who wrote a line; a rank's stdout and stderr have one writer."""
    return line.node, line.rank, line.stream if line.rank is None else None


@dataclass(kw_only=True)
class _Recent:
    """The last lines of one source that may be wanted, and how many are still wanted."""

    lines: deque[LogLine]
    wanted: int = 0
    is_torn: bool = True  # a gap between the lines and what was shown last


def with_context(
    lines: Iterable[LogLine], wants: Callable[[LogLine], bool], count: int
) -> Iterator[LogLine | Break]:
    """Yield the wanted lines of a stream of all lines, with `count` before and after each."""
    recent: dict[Writer, _Recent] = {}
    is_first = True
    for line in lines:
        source = recent.get(writer_of(line))
        if source is None:
            source = recent[writer_of(line)] = _Recent(lines=deque(maxlen=count))
        if wants(line):
            if source.is_torn and not is_first:
                yield BREAK
            yield from source.lines
            source.lines.clear()
            source.wanted, source.is_torn, is_first = count, False, False
            yield line
        elif source.wanted:
            source.wanted -= 1
            yield line
        else:
            source.is_torn = source.is_torn or len(source.lines) == count
            source.lines.append(line)


def context_of(
    lines: Iterable[LogLine], files: Mapping[str, LogFile], count: int
) -> Iterator[LogLine | Break]:
    """Yield lines with their neighbours in `files`, which are keyed by node.

    No line is repeated if the lines of each source are in file order.
    """
    shown_to: dict[Writer, int] = {}
    for line in lines:
        source = writer_of(line)
        limit = shown_to.get(source, -1)
        before, after = around(files[line.node], line, count + 1)
        if line.offset > limit and all(other.offset > limit for other in before) and shown_to:
            yield BREAK
        stretch = [*before[max(len(before) - count, 0) :], line, *after[:count]]
        yield from (other for other in stretch if other.offset > limit)
        shown_to[source] = max(limit, stretch[-1].offset)


def around(file: LogFile, line: LogLine, count: int) -> tuple[list[LogLine], list[LogLine]]:
    """Find up to `count` lines of the same source before and after a line, oldest first.

    Search at most 1 MiB each way. Raises ClusterrunError for a file that can't be read.
    """
    return _before(file, line, count), _after(file, line, count)


def _before(file: LogFile, line: LogLine, count: int) -> list[LogLine]:
    found: list[LogLine] = []
    end, rest = line.offset, b""
    lowest = max(line.offset - _REACH_BYTES, 0)
    while end > lowest and len(found) < count:
        start = max(end - _STEP_BYTES, lowest)
        block = read_once(file.path, start, end - start) + rest
        cut = block.find(b"\n") + 1 if start else 0
        rest, block = block[:cut], block[cut:]
        found = [*_lines_of(line, block, start + cut), *found]
        end = start
    return found[max(len(found) - count, 0) :]


def _after(file: LogFile, line: LogLine, count: int) -> list[LogLine]:
    found: list[LogLine] = []
    at, rest = line.offset, b""
    while at < line.offset + _REACH_BYTES and len(found) <= count:
        block = read_once(file.path, at, _STEP_BYTES)
        whole, newline, tail = (rest + block).rpartition(b"\n")
        found += _lines_of(line, whole + newline, at - len(rest))
        at, rest = at + len(block), tail
        if len(block) < _STEP_BYTES:
            break
    return [other for other in found if other.offset > line.offset][:count]


def _lines_of(line: LogLine, block: bytes, offset: int) -> Iterator[LogLine]:
    """Yield the lines of a block that `line`'s source wrote."""
    for match in pattern_of_lines(line.rank, line.stream).finditer(block):
        yield parse_line(
            match[0], node=line.node, offset=offset + match.start(), near_us=line.epoch_us
        )
