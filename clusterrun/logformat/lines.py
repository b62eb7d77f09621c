"""The format of a node's log, its index and its side file, as in docs/contracts.md."""

from __future__ import annotations

import re
import struct
from enum import Enum
from typing import NamedTuple


class Stream(str, Enum):
    """Where a line came from; the value is the letter in the log file.

    GAP and END are the agent's records of lost bytes and of the log's end.
    """

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
MAX_SPEAKERS = 20_000  # that are remembered: a damaged file may name any number of ranks
LINE_BYTES = 1 << 16  # agents cut longer lines
SIDE_TEXT_BYTES = 4096  # of a line in a side file
STAMPED = re.compile(  # the head of a line; 16 digits of µs: until 2286, which datetime can write
    rb"([0-9]{16}) (-|[0-9]{1,9}) ([oelagzOELAGZ])(?= |\n|\Z)"
)
_STAMPED_LINE = re.compile(rb"^" + STAMPED.pattern, re.MULTILINE)
# What a block holds if a line of this kind is in it.
GAP_LITERAL, END_LITERAL = b" g ", b" z "
SPEAKER_LITERALS = (b" - l ", b" - a ", b" - L ", b" - A ")

_GAP = re.compile(rb"([oela]) ([0-9]{1,18})(?: (.*))?\Z", re.DOTALL)
_SIDE = re.compile(rb"([^ ]*?)(\+?) ([0-9]{1,18})(?: (.*))?\Z", re.DOTALL)
_END = re.compile(rb"^[0-9]{16} - z [^\n]*\n\Z", re.MULTILINE)
_LEFT_OUT = re.compile(rb"^[0-9]{16} - g - [0-9]+ x ", re.MULTILINE)
_LEFT_OUT_TEXT = b"x "
_NO_CLASS = b"-"
INDEX_ENTRY = struct.Struct("<QQQ")  # the fields of an IndexEntry
INDEX_ENTRY_BYTES = INDEX_ENTRY.size


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


def line_head(time_us: int, rank: str, stream: str) -> bytes:
    """Return what precedes a text; a stream in upper case means that the line was cut."""
    return b"%016d %s %s " % (time_us, rank.encode(), stream.encode())


def parse_line(raw: bytes, *, node: str, offset: int, near_us: int) -> LogLine:
    """Parse `<epoch µs> <rank> <stream> <text>`, the newline taken off.

    A line without that head (a torn write, a hole) becomes a whole one of the launcher, at
    `near_us`.

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
    """Read rank and stream of a head, and whether the line was cut."""
    stream, partial = _LETTERS[head[3]]
    return None if head[2] == b"-" else int(head[2]), stream, partial


def find_stamped(data: bytes, start: int = 0) -> int:
    """Return where the first line with a head starts, at `start` or later; -1 if there is none.

    A line starts at `start`.
    """
    found = _STAMPED_LINE.search(data, start)
    return found.start() if found else -1


def last_stamp(data: bytes) -> bytes | None:
    """Return the stamp of the last line that has a head; `data` starts with a line."""
    end = len(data)
    while end > 0:
        end = data.rfind(b"\n", 0, end - 1) + 1
        if head := STAMPED.match(data, end):
            return head[1]
    return None


def pattern_of_lines(rank: int | None, stream: Stream) -> re.Pattern[bytes]:
    """Return a pattern of the lines of a rank, or of a stream of no rank, within a block."""
    speaker = OF_NO_RANK.encode() if rank is None else b"%d" % rank
    letters = b"oe" if rank is not None else stream.value.encode()
    letters += letters.upper()
    return re.compile(rb"^[0-9]{1,16} %s [%s](?: .*)?$" % (speaker, letters), re.MULTILINE)


class Gap(NamedTuple):
    """How many bytes of a stream are missing at a place, and why."""

    stream: Stream
    size_bytes: int
    reason: str


def gap_text(stream: str, size_bytes: int, reason: str) -> bytes:
    """Return the text of a line of stream GAP."""
    return f"{stream} {size_bytes} {reason}".encode()


def parse_gap(text: bytes) -> Gap | None:
    """Parse the text of a line of stream GAP; None for a damaged one or a side file's own."""
    found = _GAP.match(text)
    if found is None:
        return None
    reason = (found[3] or b"").decode("utf-8", "replace")
    return Gap(Stream(found[1].decode()), int(found[2]), reason)


def left_out_text(lines: int) -> bytes:
    """Return the text of a side file's record of lines that it leaves out."""
    return _LEFT_OUT_TEXT + b"%d repeated, or more than this file may hold" % lines


def is_left_out(line: LogLine) -> bool:
    """Whether a line is a side file's record of lines that it leaves out."""
    return line.stream is Stream.GAP and line.text.startswith(_LEFT_OUT_TEXT)


def holds_left_out(data: bytes) -> bool:
    """Whether a block of a side file has such a record."""
    return b" - g - " in data and _LEFT_OUT.search(data) is not None


def end_text(code: int, reason: str) -> bytes:
    """Return the text of the last line of a log."""
    return f"{code} {' '.join(reason.split())}".encode(errors="replace")


def parse_end(text: bytes) -> tuple[int, str]:
    """Parse the text of a line of stream END: exit status and reason; 0 for a damaged status."""
    code, _, reason = text.partition(b" ")
    number = int(code) if re.fullmatch(rb"[0-9]{1,9}", code) else 0
    return number, reason.decode("utf-8", "replace")


def is_complete(tail: bytes) -> bool:
    """Whether the last bytes of a log are the record of its end."""
    return _END.search(tail) is not None


class SideEntry(NamedTuple):
    """The text of a side file's line: its class ("" for none), its place in the log, and itself.

    `has_more` says that the log has more of the line.
    """

    kind: str
    has_more: bool
    offset: int
    text: bytes


def side_text(entry: SideEntry) -> bytes:
    """Return the text of a line in a side file."""
    kind = (entry.kind.encode() or _NO_CLASS) + b"+" * entry.has_more
    return b"%s %d %s" % (kind, entry.offset, entry.text)


def parse_side_text(text: bytes) -> SideEntry | None:
    """Parse the text of a line in a side file; None for a damaged one."""
    found = _SIDE.match(text)
    if found is None:
        return None
    kind = "" if found[1] == _NO_CLASS else found[1].decode("utf-8", "replace")
    return SideEntry(kind, bool(found[2]), int(found[3]), found[4] or b"")


class IndexEntry(NamedTuple):
    """The time of a line, its place in the log, and its number."""

    time_us: int
    offset: int
    line: int


def unpack_index_entry(raw: bytes) -> IndexEntry | None:
    """Read an entry; None for a part of one."""
    return IndexEntry(*INDEX_ENTRY.unpack(raw)) if len(raw) == INDEX_ENTRY_BYTES else None
