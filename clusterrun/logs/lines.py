"""One stamped log line."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Stream(str, Enum):
    """Where a line came from; the value is the letter in the log file.

    GAP and END are records of the agent: bytes that were lost, and the end of this node's log.
    """

    OUT = "o"
    ERR = "e"
    LAUNCHER = "l"
    AGENT = "a"
    GAP = "g"
    END = "z"

    @property
    def label(self) -> str:
        """Name the stream for people and for JSON."""
        return _LABELS[self]


_LABELS = {
    Stream.OUT: "out",
    Stream.ERR: "err",
    Stream.LAUNCHER: "launcher",
    Stream.AGENT: "agent",
    Stream.GAP: "gap",
    Stream.END: "end",
}
_LETTERS = {stream.value.encode(): (stream, False) for stream in Stream} | {
    stream.value.upper().encode(): (stream, True) for stream in Stream
}
BEFORE_ALL = b"0" * 16  # a stamp
MAX_HEAD_BYTES = 32
MAX_SPEAKERS = 20_000  # that are remembered: a damaged file may name any number of ranks
STAMPED = re.compile(  # the head of a line; 16 digits of µs: until 2286, which datetime can write
    rb"([0-9]{16}) (-|[0-9]{1,9}) ([oelagzOELAGZ])(?= |\n|\Z)"
)


class LogLine(NamedTuple):
    """A line as its node's agent stamped it.

    `rank` is None for the launcher and the agent. `text` has no newline; `partial` says that the
    next line of this rank and stream continues it. `offset` is the line's place in its node's log.
    """

    epoch_us: int
    node: str
    rank: int | None
    stream: Stream
    text: bytes
    partial: bool
    offset: int


def parse_line(raw: bytes, *, node: str, offset: int, near_us: int) -> LogLine:
    """Read `<epoch µs> <rank> <stream> <text>`, the newline taken off.

    A line without that head (a torn write, a hole) is given whole, as the launcher's, with the
    time of its neighbour.

    >>> line = parse_line(b"1700000000000000 3 E 50 %", node="n1", offset=0, near_us=0)
    >>> line.rank, line.stream.label, line.text, line.partial
    (3, 'err', b'50 %', True)
    """
    head = STAMPED.match(raw)
    if not head:
        return LogLine(
            epoch_us=near_us,
            node=node,
            rank=None,
            stream=Stream.LAUNCHER,
            text=raw,
            partial=False,
            offset=offset,
        )
    rank, stream, partial = who_wrote(head)
    return LogLine(
        epoch_us=int(head[1]),
        node=node,
        rank=rank,
        stream=stream,
        text=raw[head.end() + 1 :],
        partial=partial,
        offset=offset,
    )


def who_wrote(head: re.Match[bytes]) -> tuple[int | None, Stream, bool]:
    """Read rank and stream of a head, and whether the line was cut."""
    stream, partial = _LETTERS[head[3]]
    return None if head[2] == b"-" else int(head[2]), stream, partial


def find_stamped(data: bytes, start: int = 0) -> int:
    """Find the first line with a head that begins at or after `start`, itself a line's beginning.

    -1 where there is none.
    """
    while start < len(data):
        if STAMPED.match(data, start):
            return start
        newline = data.find(b"\n", start)
        if newline < 0:
            return -1
        start = newline + 1
    return -1


def last_stamped(data: bytes) -> int:
    """Find the last line that has a head, `data` being the beginning of one; -1 for none."""
    end = len(data)
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        if STAMPED.match(data, start):
            return start
        end = start
    return -1


def last_stamp(data: bytes) -> bytes | None:
    """Find the stamp of the last line that has a head."""
    start = last_stamped(data)
    return data[start : start + 16] if start >= 0 else None
