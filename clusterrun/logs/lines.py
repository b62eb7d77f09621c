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
_TIME_DIGITS = 16  # µs: until the year 2286, which datetime can still write
_MAX_RANK_DIGITS = 9
BEFORE_ALL = b"0" * 16  # a stamp
MAX_HEAD_BYTES = 32
STAMPED = re.compile(  # the head of a line
    rb"[0-9]{16} (?:-|[0-9]{1,9}) [oelagzOELAGZ](?= |\n|\Z)"
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
    head = raw.split(b" ", 3)
    if len(head) < 3 or not _is_head(*head[:3]):
        return LogLine(
            epoch_us=near_us,
            node=node,
            rank=None,
            stream=Stream.LAUNCHER,
            text=raw,
            partial=False,
            offset=offset,
        )
    stream, partial = _LETTERS[head[2]]
    return LogLine(
        epoch_us=int(head[0]),
        node=node,
        rank=None if head[1] == b"-" else int(head[1]),
        stream=stream,
        text=head[3] if len(head) == 4 else b"",
        partial=partial,
        offset=offset,
    )


def _is_head(time_us: bytes, rank: bytes, letter: bytes) -> bool:
    return (
        time_us.isdigit()
        and len(time_us) == _TIME_DIGITS
        and (rank == b"-" or (rank.isdigit() and len(rank) <= _MAX_RANK_DIGITS))
        and letter in _LETTERS
    )


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
