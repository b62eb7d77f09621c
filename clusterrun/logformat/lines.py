"""The format of a node's log and its side file, as in docs/contracts.md."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Stream(str, Enum):
    """Where a line came from, by its letter; GAP and END are records: lost bytes, the log's end."""

    OUT = "o"
    ERR = "e"
    LAUNCHER = "l"
    AGENT = "a"
    GAP = "g"
    END = "z"

    @property
    def label(self) -> str:
        """The name of the stream for people and for JSON."""
        return self.name.lower()


_LETTERS = {stream.value.encode(): (stream, False) for stream in Stream} | {
    stream.value.upper().encode(): (stream, True) for stream in Stream
}
RECORDS = frozenset({Stream.GAP, Stream.END})
OF_NO_RANK = "-"  # the rank of a line of the launcher or the agent
BEFORE_ALL = b"0" * 16  # a stamp
MAX_HEAD_BYTES = 32
LINE_BYTES = 1 << 16  # agents cut longer lines
SIDE_TEXT_BYTES = 4096  # of a line in a side file
STAMPED = re.compile(  # the head of a line; 16 digits of µs last until 2286
    rb"([0-9]{16}) (-|[0-9]{1,9}) ([oelagzOELAGZ])(?= |\n|\Z)"
)
STAMPED_LINE = re.compile(rb"^" + STAMPED.pattern, re.MULTILINE)
# Bytes that a block contains if it has a line of this kind.
GAP_LITERAL, END_LITERAL = b" g ", b" z "

_GAP = re.compile(rb"([oela]) ([0-9]{1,18})(?: (.*))?\Z", re.DOTALL)
_SIDE = re.compile(rb"([^ ]{0,99}?)(\+?) ([0-9]{1,18})(?: (.*))?\Z", re.DOTALL)
LEFT_OUT_TEXT = b"x repeated, or more than this file may hold"  # of a side file's record
_NO_CLASS = b"-"
Speaker = tuple[str, "int | None", Stream]  # who wrote a line: node, rank and stream


class LogLine(NamedTuple):
    """A line as its node's agent stamped it."""

    epoch_us: int
    node: str
    rank: int | None  # None: the launcher or the agent
    stream: Stream
    text: bytes  # without the newline
    partial: bool  # the next line of this rank and stream continues it
    offset: int  # its place in its node's log


def line_head(time_us: int, rank: str, stream: str) -> bytes:
    """Return the head of a line; a stream in upper case means that the line was cut."""
    return b"%016d %s %s " % (time_us, rank.encode(), stream.encode())


def parse_line(raw: bytes, *, node: str, offset: int, near_us: int) -> LogLine:
    """Parse `<epoch µs> <rank> <stream> <text>` without its newline.

    A line without that head (a torn write, a hole) becomes a whole line of the launcher, with the
    time `near_us`.

    >>> line = parse_line(b"1700000000000000 3 E 50 %", node="n1", offset=0, near_us=0)
    >>> line.rank, line.stream.label, line.text, line.partial
    (3, 'err', b'50 %', True)
    """
    head = STAMPED.match(raw)
    if not head:
        return LogLine(near_us, node, None, Stream.LAUNCHER, raw, partial=False, offset=offset)
    rank, stream, partial = who_wrote(head)
    return LogLine(int(head[1]), node, rank, stream, raw[head.end() + 1 :], partial, offset)


def who_wrote(head: re.Match[bytes]) -> tuple[int | None, Stream, bool]:
    """Return the rank and stream of a head, and whether the line was cut."""
    stream, partial = _LETTERS[head[3]]
    rank = None if head[2] == b"-" else int(head[2])
    return rank, stream, partial


def last_stamp(data: bytes) -> bytes | None:
    """Return the stamp of the last line with a head; `data` starts with a line."""
    end = len(data)
    while end > 0:
        end = data.rfind(b"\n", 0, end - 1) + 1  # where the line before it begins
        if head := STAMPED.match(data, end):
            return head[1]
    return None


class Gap(NamedTuple):
    """The number of bytes of a stream that are missing at a place, and the reason."""

    stream: Stream
    size_bytes: int
    reason: str


def gap_text(stream: str, size_bytes: int, reason: str) -> bytes:
    """Return the text of a GAP line."""
    return f"{stream} {size_bytes} {reason}".encode()


def parse_gap(text: bytes) -> Gap | None:
    """Parse the text of a GAP line; None for a damaged one and for records of side files."""
    found = _GAP.match(text)
    if found is None:
        return None
    reason = (found[3] or b"").decode("utf-8", "replace")
    return Gap(Stream(found[1].decode()), int(found[2]), reason)


def is_left_out(line: LogLine) -> bool:
    """Return whether a line is a side file's record of omitted lines."""
    return line.stream is Stream.GAP and line.text.startswith(b"x ")


def end_text(code: int, reason: str) -> bytes:
    """Return the text of the last line of a log."""
    return f"{code} {' '.join(reason.split())}".encode(errors="replace")


def parse_end(text: bytes) -> int:
    """Return the exit status in the text of an END line; 0 for a damaged one."""
    code, _, _ = text.partition(b" ")
    return int(code) if re.fullmatch(rb"[0-9]{1,9}", code) else 0


class SideEntry(NamedTuple):
    """The fields of a side file's line."""

    kind: str  # its class; "" for none
    has_more: bool  # the log has more of the line
    offset: int  # its place in the log
    text: bytes


def side_text(entry: SideEntry) -> bytes:
    """Format an entry as the text of a side file's line."""
    kind = (entry.kind.encode() or _NO_CLASS) + (b"+" if entry.has_more else b"")
    return b"%s %d %s" % (kind, entry.offset, entry.text)


def parse_side_text(text: bytes) -> SideEntry | None:
    """Parse the text of a line in a side file; None for a damaged one."""
    found = _SIDE.match(text)
    if found is None:
        return None
    kind = "" if found[1] == _NO_CLASS else found[1].decode("utf-8", "replace")
    return SideEntry(kind, bool(found[2]), int(found[3]), found[4] or b"")
