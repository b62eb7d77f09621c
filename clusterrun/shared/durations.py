"""Parse and format spans of time: the six formats of Slurm's limits, and 90s, 30m, 2h."""

from __future__ import annotations

import re
from typing import Final

from clusterrun.errors import UsageError

_LIMIT: Final = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,6})(?::(?P<minutes>[0-9]{1,6}))?"
    r"(?::(?P<seconds>[0-9]{1,6}))?"
    r"|(?P<fields>[0-9]{1,9}(?::[0-9]{1,9}){0,2}))\Z"
)
_SPAN: Final = re.compile(r"([0-9]{1,12})\s*([smhd]?)\Z")
_UNIT_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_ENDLESS: Final = ("UNLIMITED", "INFINITE", "-1")


def parse_slurm_minutes(text: str) -> int:
    """Parse a time limit in any of sbatch's six formats; return minutes, rounded up.

    >>> [parse_slurm_minutes(text) for text in ("90", "90:30", "1:30:00")]
    [90, 91, 90]
    >>> [parse_slurm_minutes(text) for text in ("1-12", "1-12:30", "1-12:30:01")]
    [2160, 2190, 2191]

    Raises UsageError for another format, and for "no limit".
    """
    stripped = text.strip()
    if stripped.upper() in _ENDLESS:
        raise _endless(stripped)
    match = _LIMIT.match(stripped)
    if match is None or _overflows(match):
        raise _not_a_limit(text)
    minutes = -(-_limit_seconds(match) // 60)
    if minutes == 0:
        raise _endless(stripped)
    return minutes


def _overflows(match: re.Match[str]) -> bool:
    """Whether minutes or seconds behind another field are more than 59, as in 25:99."""
    behind = (match["fields"] or "").split(":")[1:]
    return any(int(field or 0) > 59 for field in (*behind, match["minutes"], match["seconds"]))


def _limit_seconds(match: re.Match[str]) -> int:
    if match["days"] is None:
        return _colon_seconds([int(field) for field in match["fields"].split(":")])
    days, hours, minutes, seconds = (
        int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds")
    )
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _colon_seconds(fields: list[int]) -> int:
    """Add up `minutes`, `minutes:seconds` or `hours:minutes:seconds`."""
    if len(fields) == 3:
        return (fields[0] * 60 + fields[1]) * 60 + fields[2]
    return fields[0] * 60 + sum(fields[1:])


def _endless(text: str) -> UsageError:
    # Slurm reads 0 as "no limit", too.
    return UsageError(
        f"time limit '{text}' means no limit",
        hint="give a limit; a job without one is never backfilled and waits longest",
    )


def _not_a_limit(text: str) -> UsageError:
    span = _SPAN.match(text.strip())
    if span is not None and span[2]:
        minutes = -(-int(span[1]) * _UNIT_SECONDS[span[2]] // 60)
        hint = f"write '{format_minutes(minutes)}'"
    else:
        hint = "write 90 (minutes), 1:30:00 (hours) or 1-12:00:00 (days)"
    return UsageError(f"'{text}' is not a time limit", hint=hint)


def format_minutes(minutes: int) -> str:
    """Format minutes as Slurm shows a limit.

    >>> format_minutes(90), format_minutes(2160)
    ('01:30:00', '1-12:00:00')
    """
    hours, rest = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02}:{rest:02}:00"
    return f"{days}-{clock}" if days else clock


def parse_seconds(text: str) -> int:
    """Parse a number of seconds, or one with the unit s, m, h or d.

    >>> [parse_seconds(text) for text in ("90", "90s", "30m", "2h", "1d")]
    [90, 90, 1800, 7200, 86400]

    Raises UsageError for anything else.
    """
    match = _SPAN.match(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a time span", hint="write 90 (seconds), 90s, 30m or 2h")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def format_seconds(seconds: int) -> str:
    """Format seconds in the largest unit that divides them.

    >>> [format_seconds(seconds) for seconds in (90, 1800, 7200, 86400, 0)]
    ['90s', '30m', '2h', '1d', '0s']
    """
    for unit in "dhm":
        if seconds and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{seconds // _UNIT_SECONDS[unit]}{unit}"
    return f"{seconds}s"
