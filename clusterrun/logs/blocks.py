"""Turn stretches of a file into the wanted lines.

Most of the reading time is spent here. So a search first looks for its literals in a whole block,
then at the bytes of each line's head (` 149 o `). Only wanted lines become objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from clusterrun.logformat.lines import (
    BEFORE_ALL,
    LINE_BYTES,
    MAX_HEAD_BYTES,
    MAX_SPEAKERS,
    RECORDS,
    STAMPED,
    LogLine,
    Stream,
    is_left_out,
    last_stamp,
    parse_line,
    parse_side_text,
    who_wrote,
)
from clusterrun.logformat.literals import Literals
from clusterrun.logs.files import FileKind, OpenFiles
from clusterrun.logs.sources import Source, Takes

_CUT = "…".encode()

Head = tuple[bool, "int | None", Stream, bool]


class LineHeads(dict[bytes, "Head | None"]):
    """Maps ` <rank> <stream> ` to its meaning, and to whether such lines are wanted."""

    def __init__(self, takes: Takes) -> None:
        super().__init__()
        self._takes = takes

    def __missing__(self, key: bytes) -> Head | None:
        match = STAMPED.match(BEFORE_ALL + key)
        if not match:
            return None
        rank, stream, partial = who_wrote(match)
        head = (self._takes(rank, stream), rank, stream, partial)
        if len(self) < MAX_SPEAKERS:  # a damaged file may contain any number
            self[key] = head
        return head


def parse_log(
    data: bytes, *, node: str, offset: int, near: bytes, heads: LineHeads, torn: bool
) -> tuple[list[LogLine], bytes]:
    """Return the wanted lines of `data` and the last stamp.

    `data` contains whole lines and begins at `offset`; `near` is the stamp before it. A line whose
    stamp runs backwards gets the time of the line before it. So does a line without a head (a torn
    write, a hole), which is attributed to the launcher.
    """
    lines: list[LogLine] = []
    add, new = lines.append, tuple.__new__
    near_us = int(near)
    for raw in data.split(b"\n"):
        cut = raw.find(b" ", 17) + 3
        head = heads[raw[16:cut]]
        if head is not None and ((stamp := raw[:16]) == near or stamp.isdigit()):
            if stamp > near:
                near, near_us = stamp, int(stamp)
            wanted, rank, stream, partial = head
            if wanted:
                add(new(LogLine, (near_us, node, rank, stream, raw[cut:], partial, offset)))
        elif torn and raw:
            add(LogLine(near_us, node, None, Stream.LAUNCHER, raw, False, offset))
        offset += len(raw) + 1
    return lines, near


class Sieve:
    """Picks the wanted lines of one source out of blocks that come in order.

    If lines are chosen by their text, each wanted piece of a cut line becomes a separate line with
    a mark: the next piece may not be wanted.
    """

    def __init__(self, source: Source, files: OpenFiles) -> None:
        self._source, self._files = source, files
        self._heads = LineHeads(source.takes)
        self._takes_torn = source.takes(None, Stream.LAUNCHER)
        self.near = BEFORE_ALL
        self.place = source.start

    def skips(self, data: bytes, offset: int) -> bool:
        """Return whether these whole lines contain nothing wanted; if so, move past them."""
        literals = self._source.literals
        if not literals or any(literal in data for literal in literals):
            return False
        self._advance(data, offset)
        return True

    def _advance(self, data: bytes, offset: int) -> None:
        kind = self._source.file.kind
        if kind is not FileKind.PLAIN:
            self.near = max(self.near, last_stamp(data) or self.near)
        if kind is not FileKind.ERRORS:
            self.place = offset + len(data)

    def pick(self, data: bytes, offset: int) -> list[LogLine]:
        """Return the wanted lines of `data`, which contains whole lines and begins at `offset`.

        Set `near` to the last stamp and `place` to the next line's place in its node's log.
        """
        kind = self._source.file.kind
        lines = (
            self._parse_plain(data, offset) if kind is FileKind.PLAIN else self._parse(data, offset)
        )
        if kind is FileKind.ERRORS:
            lines = list(self._without_class(lines))
        self._advance(data, offset)
        if self._source.wants is not None:
            lines = [
                line._replace(text=line.text + _CUT, partial=False) if line.partial else line
                for line in filter(self._source.wants, lines)
            ]
        return lines

    def _parse(self, data: bytes, offset: int) -> list[LogLine]:
        lines: list[LogLine] = []
        literals = self._source.literals
        for start, end in find_stretches(data, literals) if literals else [(0, len(data))]:
            found, self.near = parse_log(
                data[start:end],
                node=self._source.file.node,
                offset=offset + start,
                near=self.near,
                heads=self._heads,
                torn=self._takes_torn,
            )
            lines += found
        return lines

    def _parse_plain(self, data: bytes, offset: int) -> list[LogLine]:
        if not self._source.takes(None, Stream.OUT):
            return []
        lines, node = [], self._source.file.node
        *whole, rest = data.split(b"\n")
        for raw in whole:
            lines.append(LogLine(0, node, None, Stream.OUT, raw, False, offset))
            offset += len(raw) + 1
        if rest:
            lines.append(LogLine(0, node, None, Stream.OUT, rest, True, offset))
        return lines

    def _without_class(self, lines: list[LogLine]) -> Iterator[LogLine]:
        """Yield the lines of a side file without `<class> <offset>`; damaged ones stay whole."""
        is_all = not self._source.only_errors
        for line in lines:
            entry = parse_side_text(line.text)
            if entry is None:
                yield line._replace(offset=self.place)
                continue
            self.place = max(self.place, entry.offset)
            if is_all or entry.kind or line.stream in RECORDS:
                noted = line._replace(text=entry.text, offset=self.place)
                if not is_left_out(noted):
                    yield self._in_full(noted) if entry.has_more else noted

    def _in_full(self, noted: LogLine) -> LogLine:
        """Read the whole line from the log; mark it as cut if the log lacks it."""
        log = self._source.file.log
        raw = self._files.read(log, noted.offset, MAX_HEAD_BYTES + LINE_BYTES) if log else b""
        raw, newline, _ = raw.partition(b"\n")
        found = parse_line(raw, node=noted.node, offset=noted.offset, near_us=0)
        is_same = newline and found[2:4] == noted[2:4] and found.text.startswith(noted.text)
        text = found.text if is_same else noted.text
        return noted._replace(text=text if is_same and not found.partial else text + _CUT)


def find_stretches(data: bytes, literals: Literals) -> list[tuple[int, int]]:
    """Return lines that contain a literal, each with the lines before it up to one with a head."""
    hits = [(literal, data.find(literal)) for literal in literals]
    found: list[tuple[int, int]] = []
    end = 0
    while hits := [
        (literal, place if place >= end else data.find(literal, end))
        for literal, place in hits
        if place >= 0
    ]:
        place = min((place for _, place in hits if place >= 0), default=-1)
        if place < 0:
            break
        start = data.rfind(b"\n", 0, place) + 1
        while start > end and not STAMPED.match(data, start):
            start = data.rfind(b"\n", 0, start - 1) + 1
        newline = data.find(b"\n", place)
        end = newline + 1 if newline >= 0 else len(data)
        found.append((start, end))
    return found
