"""Split output into pieces, and stamp their lines, whole blocks at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from clusterrun.logformat.lines import LINE_BYTES, line_head


class Piece(NamedTuple):
    """Whole lines with their newlines; if `is_cut`, the beginning of one line, without newline."""

    text: bytes
    is_cut: bool


def split_pieces(data: bytes, *, with_rest: bool = False) -> list[Piece]:
    """Split the bytes of one stream; an unfinished last line waits until it exceeds LINE_BYTES.

    `with_rest` also takes that line, except for part of a character. The pieces are in order.
    """
    pieces: list[Piece] = []
    start = run = 0  # of the current line, and of the whole lines before it
    while (end := _line_end(data, start)) > start:
        if data[end - 1 : end] != b"\n":
            pieces += [Piece(data[run:start], is_cut=False)] if run < start else []
            pieces.append(Piece(data[start:end], is_cut=True))
            run = end
        start = end
    if run < start:
        pieces.append(Piece(data[run:start], is_cut=False))
    rest = data[start : whole_characters(data, len(data))] if with_rest else b""
    return [*pieces, Piece(rest, is_cut=True)] if rest else pieces


def _line_end(data: bytes, start: int) -> int:
    """Return the end of the last line within LINE_BYTES, else where to cut it, else `start`."""
    newline = data.rfind(b"\n", start, start + LINE_BYTES + 1)
    if newline >= 0:
        return newline + 1
    return start if len(data) - start <= LINE_BYTES else whole_characters(data, start + LINE_BYTES)


def whole_characters(data: bytes, end: int) -> int:
    """Return the last offset up to `end` that splits no UTF-8 character."""
    for back in range(1, min(4, end + 1)):
        byte = data[end - back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return end - back if length > back else end
    return end


def stamp(piece: Piece, time_us: int, rank: str, stream: str) -> bytes:
    """Return the lines of a piece with their heads."""
    if piece.is_cut:
        return line_head(time_us, rank, stream.upper()) + piece.text + b"\n"
    head = line_head(time_us, rank, stream)
    return (head + piece.text.replace(b"\n", b"\n" + head))[: -len(head)]


class Loss(NamedTuple):
    """A number of bytes that were not forwarded, and why."""

    size: int
    reason: str


class Caps:
    """The caps of all ranks of a node; 0 means no cap. Launcher and agent have none."""

    def __init__(self, lines_per_s: int, line_bytes: int) -> None:
        self._lines_per_s, self._line_bytes = lines_per_s, line_bytes
        self._rates: dict[str, Rate] = {}
        self._lengths: dict[tuple[str, str], LineLength] = {}

    def allow(self, piece: Piece, rank: str, stream: str, now: float) -> Iterator[Piece | Loss]:
        """Yield the pieces to forward and the losses, in order; `now` in seconds of any clock."""
        if rank == "-" or not (self._lines_per_s or self._line_bytes):
            yield piece
            return
        some: Iterator[Piece | Loss] = iter((piece,))
        if self._lines_per_s:  # first: a line that is left out must not be counted twice
            some = self._rates.setdefault(rank, Rate(self._lines_per_s)).allow(piece, now)
        length = self._lengths.setdefault((rank, stream), LineLength(self._line_bytes))
        for part in some:
            if isinstance(part, Loss) or not self._line_bytes:
                yield part
            else:
                yield from length.allow(part)

    def forget(self, rank: str, stream: str) -> None:
        """Treat the next bytes as the beginning of a line: bytes before them were dropped."""
        self._lengths.pop((rank, stream), None)


class Rate:
    """How many lines one rank may still write in the current second."""

    def __init__(self, lines_per_s: int) -> None:
        self.lines_per_s = lines_per_s
        self._left = lines_per_s
        self._since = 0.0

    def allow(self, piece: Piece, now: float) -> Iterator[Piece | Loss]:
        """Yield the lines within the limit, then the loss if there are more."""
        if now - self._since >= 1:
            self._since, self._left = now, self.lines_per_s
        count = 1 if piece.is_cut else piece.text.count(b"\n")
        end = len(piece.text)
        if count > self._left:
            lines = [] if piece.is_cut else piece.text.split(b"\n", self._left)[: self._left]
            end = sum(map(len, lines)) + len(lines)
        self._left -= min(count, self._left)
        if end:
            yield Piece(piece.text[:end], piece.is_cut)
        if end < len(piece.text):
            yield Loss(len(piece.text) - end, f"more than {self.lines_per_s} lines/s")


class LineLength:
    """The limit on the length of one stream's lines."""

    def __init__(self, line_bytes: int) -> None:
        self._line_bytes = line_bytes
        self._given = 0  # of an unfinished line
        self._is_over = False

    def allow(self, piece: Piece) -> Iterator[Piece | Loss]:
        """Yield the lines, long ones cut; the end of a long line is lost with its newline."""
        run = b""
        for line in _lines(piece.text):
            is_ended = line.endswith(b"\n")
            room = 0 if self._is_over else self._line_bytes - self._given
            if not self._is_over and len(line) - is_ended <= room:
                run += line
                self._given = 0 if is_ended else self._given + len(line)
                continue
            if run:
                yield Piece(run, is_cut=False)
                run = b""
            end = whole_characters(line, room)
            if end:
                yield Piece(line[:end], is_cut=True)
            yield Loss(len(line) - end, f"lines longer than {self._line_bytes} bytes")
            self._given, self._is_over = 0, not is_ended
        if run:
            yield Piece(run, piece.is_cut)


def _lines(text: bytes) -> list[bytes]:
    *whole, rest = text.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
