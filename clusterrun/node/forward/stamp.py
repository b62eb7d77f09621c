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


class Rate:
    """How many lines a rank may still write in the current second."""

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
