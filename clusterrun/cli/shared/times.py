"""Times for people and programs."""

from __future__ import annotations

from datetime import datetime, timezone

SECONDS_A_DAY = 86400


def local_time(epoch_s: float) -> str:
    """Write a moment in local time, without the day if it is less than half a day away."""
    then = datetime.fromtimestamp(epoch_s)
    is_near = abs((then - datetime.now()).total_seconds()) < SECONDS_A_DAY / 2
    return f"{then:%H:%M}" if is_near else f"{then:%Y-%m-%d %H:%M}"


def timestamp(epoch_s: float | None) -> str | None:
    """Write a time as RFC 3339 in UTC.

    >>> timestamp(0.25), timestamp(None)
    ('1970-01-01T00:00:00.250Z', None)
    """
    if epoch_s is None:
        return None
    then = datetime.fromtimestamp(epoch_s, timezone.utc)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")
