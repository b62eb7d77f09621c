"""Make the text of a line safe for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RESET = "\x1b[0m"
_ON, _OFF = b"\x1b[7m", b"\x1b[27m"
_RUNS = re.compile(rb"\x00+|\x01+")

# ECMA-48: control strings (with or without their end), control sequences, other escapes;
# then the rest of the C0 and C1 sets except the tab. Last Unicode's Bidi_Control: it reverses text,
# and people would see a different line than the one that was written.
_CONTROL = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?P<sgr>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
    "|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")


def readable(text: bytes, *, keep_colours: bool) -> str:
    """Decode a text for people: without control sequences, only a progress bar's last state."""
    body = text.decode("utf-8", "replace")
    if body.isprintable():  # true for most lines: nothing to remove
        return body
    return strip_controls(last_state(body), keep_colours=keep_colours)


def strip_controls(text: str, *, keep_colours: bool) -> str:
    """Remove what could move a terminal's cursor, set its title, make it answer or reverse text.

    Keep colours (SGR) if wanted, and reset them at the end.

    >>> strip_controls("a\\x1b[2Jb\\x1b]0;title\\x07c", keep_colours=True)
    'abc'
    """
    if not keep_colours:
        return _CONTROL.sub("", text)
    kept = _CONTROL.sub(lambda match: match["sgr"] or "", text)
    return kept + _RESET if "\x1b[" in kept and not kept.endswith(_RESET) else kept


def last_state(text: str) -> str:
    """Return the last state of a progress bar: the text after the last carriage return."""
    return text.rstrip("\r").rpartition("\r")[2]


def highlighted(body: str, patterns: Iterable[re.Pattern[bytes]]) -> str:
    """Highlight what the patterns match in a readable text; keep its colours."""
    parts = [part.encode() for part in _COLOUR.split(body)]
    found = _found(b"".join(parts[::2]), patterns)
    if not any(found):
        return body
    out, place = [], 0
    for index, part in enumerate(parts):
        if index % 2:
            out.append(part)
            continue
        for run in _RUNS.finditer(found, place, place + len(part)):
            text = part[run.start() - place : run.end() - place]
            out.append(_ON + text + _OFF if found[run.start()] else text)
        place += len(part)
    return b"".join(out).decode()


def _found(text: bytes, patterns: Iterable[re.Pattern[bytes]]) -> bytearray:
    """Return for each byte whether a pattern matched any byte of its character."""
    found = bytearray(len(text))
    for pattern in patterns:
        for match in pattern.finditer(text):
            start, end = match.span()
            while start < end and text[start] & 0xC0 == 0x80:
                start -= 1
            while start < end < len(text) and text[end] & 0xC0 == 0x80:
                end += 1
            found[start:end] = b"\1" * (end - start)
    return found
