"""Format the time of a line: for people in their zone, for programs in UTC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone, tzinfo
from functools import lru_cache

Stamp = Callable[[int], str]


def stamp_writer(form: str, zone: tzinfo | None = None) -> Stamp:
    """Return a function that formats epoch µs as the time in front of a line.

    `zone` None means local time; `delta` is the time since the previous line.
    """
    if form == "none":
        return lambda epoch_us: ""
    if form == "delta":
        return _delta_writer()
    if form == "clock":
        return lambda epoch_us: f"{clock_time(epoch_us, zone)[:8]} "
    write = iso_time if form == "iso" else clock_time
    return lambda epoch_us: f"{write(epoch_us, zone)} "


def clock_time(epoch_us: int, zone: tzinfo | None = None) -> str:
    """Format a time of day with ms; dashes if the time is unknown."""
    if not epoch_us:
        return "--:--:--.---"
    seconds, us = divmod(epoch_us, 1_000_000)
    return f"{_moment(seconds, zone)[11:19]}.{us // 1000:03}"


def iso_time(epoch_us: int, zone: tzinfo | None = None) -> str:
    """Format an RFC 3339 time with its zone; a dash if the time is unknown."""
    if not epoch_us:
        return "-"
    seconds, us = divmod(epoch_us, 1_000_000)
    text = _moment(seconds, zone)
    return f"{text[:19]}.{us:06}{text[19:]}"


def utc_time(epoch_us: int) -> str | None:
    """Format an RFC 3339 time in UTC for our JSON; None if the time is unknown."""
    if not epoch_us:
        return None
    seconds, us = divmod(epoch_us, 1_000_000)
    return f"{_moment(seconds, timezone.utc)[:19]}.{us:06}Z"


def _delta_writer() -> Stamp:
    before_us = 0

    def write(epoch_us: int) -> str:
        nonlocal before_us
        delta_us = epoch_us - (before_us or epoch_us)
        before_us = epoch_us
        return f"{delta_us / 1_000_000:+10.3f} "

    return write


@lru_cache(maxsize=256)
def _moment(seconds: int, zone: tzinfo | None) -> str:
    """Format a whole second as `2026-08-01T12:41:15+02:00`."""
    return datetime.fromtimestamp(seconds, tz=timezone.utc).astimezone(zone).isoformat()
