"""Make the text of a line safe for a terminal, and format its time."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import lru_cache

_RESET = "\x1b[0m"

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


def readable(text: bytes, *, keep_colours: bool) -> str:
    """Decode a text for people: without control sequences; of a progress bar, its last state."""
    body = text.decode("utf-8", "replace")
    if body.isprintable():  # true for most lines: nothing to remove
        return body
    last_state = body.rstrip("\r").rpartition("\r")[2]  # of a progress bar
    return strip_controls(last_state, keep_colours=keep_colours)


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


def clock_time(epoch_us: int) -> str:
    """Format a local time of day with ms; dashes if the time is unknown."""
    if not epoch_us:
        return "--:--:--.---"
    seconds, us = divmod(epoch_us, 1_000_000)
    return f"{_moment(seconds)[11:19]}.{us // 1000:03}"


def utc_time(epoch_us: int) -> str | None:
    """Format an RFC 3339 time in UTC for our JSON; None if the time is unknown."""
    if not epoch_us:
        return None
    seconds, us = divmod(epoch_us, 1_000_000)
    return f"{_moment(seconds, is_utc=True)[:19]}.{us:06}Z"


@lru_cache(maxsize=256)
def _moment(seconds: int, *, is_utc: bool = False) -> str:
    """Format a whole second as `2026-08-01T12:41:15`."""
    return datetime.fromtimestamp(seconds, timezone.utc if is_utc else None).isoformat()
