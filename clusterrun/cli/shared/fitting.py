"""Fit lines and tables to the width of a terminal; elsewhere they are printed as they are."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Final, TextIO

LEAST: Final = 8  # a narrower terminal shows nothing useful
_SHORTEST: Final = 4  # columns of a cell
_LONGEST: Final = 24  # of a cell, where other columns are left out
_SGR: Final = r"\x1b\[[0-9;:]*m"  # compiled at its first use
_PIECE: Final = rf"{_SGR}|(?s:.)"
_WORD: Final = r" *[^ ]+"
_LABEL: Final = r" *\S+(?: \S+)*  +|  +"


def width_of(stream: TextIO | None) -> int | None:
    """Return the columns of a terminal; None if the stream is none, or does not say."""
    if stream is None or not stream.isatty():
        return None
    asked = os.environ.get("COLUMNS", "")
    try:
        found = int(asked) if asked.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(found, LEAST) if found else None


def cells(text: str) -> int:
    """Return how many columns a text takes, or more: marks that join a letter count."""
    text = re.sub(_SGR, "", text)
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def wrapped(line: str, width: int, indent: int | None = None) -> Iterator[str]:
    """Yield a line as lines of a width; those that follow begin below the text of its label."""
    line = line.expandtabs()
    if cells(line) <= width:
        yield line
        return
    if indent is None:
        label = re.match(_LABEL, line)
        indent = label.end() if label else 2
    margin = " " * min(indent, width // 3)
    current = ""
    for word in re.findall(_WORD, line):
        if current.strip() and cells(current + word) > width:
            yield current
            current, word = margin, word.lstrip(" ")
        while cells(current + word) > width:
            head, word = _split(word, width - cells(current))
            yield current + head
            current = margin
        current += word
    yield current


def shortened(text: str, width: int) -> str:
    """Return a text, cut to a width with an ellipsis."""
    return text if cells(text) <= width else _split(text, width - 1)[0].rstrip() + "…"


def _split(text: str, width: int) -> tuple[str, str]:
    used = 0
    for piece in re.finditer(_PIECE, text):
        used += cells(piece[0])
        if used > width:
            return text[: piece.start()], text[piece.start() :]
    return text, ""


def fitted(
    table: Sequence[Sequence[str]], width: int, spare: Collection[str]
) -> list[tuple[str, ...]]:
    """Return a table whose lines have a width at most; its first row is the head.

    Columns named in `spare` are left out, in that order, then the widest cells are cut.
    """
    columns = [list(column) for column in zip(*table, strict=True)]
    for name in spare:
        taken = (min(max(map(cells, column)), _LONGEST) for column in columns)
        if sum(taken) + 2 * len(columns) - 2 > width:
            columns = [column for column in columns if column[0] != name]
    widths = [max(map(cells, column)) for column in columns]
    while sum(widths) + 2 * len(widths) - 2 > width and max(widths) > _SHORTEST:
        widths[widths.index(max(widths))] -= 1
    rows = zip(*columns, strict=True)
    return [tuple(map(shortened, row, widths)) for row in rows]
