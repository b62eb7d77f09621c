"""Parse and format spans of time: 90s, 1h30m, 1.5h, and the six formats of Slurm's limits."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

from clusterrun.errors import UsageError

_CLOCK: Final = (
    r"(?:(?P<days>[0-9]{1,6})-(?=[0-9]{1,6}(?:\Z|:)))?(?P<fields>[0-9]{1,9}(?::[0-9]{1,9}){0,2})\Z"
)
_BARE: Final = r"[0-9]{1,12}(?:\.[0-9]{1,9})?\Z"
_PART: Final = (
    r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*"
    r"(?:(ms)|(s)(?:ec(?:ond)?s?)?|(m)(?:in(?:ute)?s?)?|(h)(?:(?:ou)?rs?)?|(d)(?:ays?)?)\s*"
)
SPAN: Final = rf"(?ai)(?:{_PART}){{1,9}}\Z"  # every number has a unit
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ENDLESS: Final = ("UNLIMITED", "INFINITE", "-1")


def parse_span(text: str, *, bare_s: int = 1) -> Decimal | None:
    """Parse a span of time as seconds; a bare number counts units of `bare_s` seconds.

    Return None for other text.

    >>> [int(parse_span(text)) for text in ("90", "90s", "1h30m", "1.5 hours", "2:30", "1-12")]
    [90, 90, 5400, 5400, 150, 129600]
    >>> parse_span("30", bare_s=60), parse_span("450ms")
    (Decimal('1800'), Decimal('0.45'))
    """
    stripped = text.strip()
    if re.match(_BARE, stripped):
        return Decimal(stripped) * bare_s
    if match := re.match(_CLOCK, stripped):
        numbers = [int(field) for field in match["fields"].split(":")]
        if any(number > 59 for number in numbers[1:]):  # as in 25:99
            return None
        if len(numbers) == 2 and not match["days"]:  # 2:30 has no hours, but 1-2:30 has
            numbers = [0, *numbers]
        hours, minutes, seconds = [*numbers, 0, 0][:3]  # the last ones may be missing: 1-12
        hours += int(match["days"] or 0) * 24
        return Decimal((hours * 60 + minutes) * 60 + seconds)
    if not re.match(SPAN, stripped):
        return None
    total = Decimal(0)
    for part in re.finditer(f"(?ai){_PART}", stripped):
        unit = next(unit for unit in part.groups()[1:] if unit).lower()  # only one group matched
        number = Decimal(part[1])
        total += number / 1000 if unit == "ms" else number * _UNIT_SECONDS[unit]
    return total


def parse_slurm_minutes(text: str) -> int:
    """Parse a time limit and return minutes, rounded up; a bare number means minutes.

    >>> [parse_slurm_minutes(text) for text in ("90", "90:30", "1:30:00", "1h", "90s")]
    [90, 91, 90, 60, 2]
    >>> [parse_slurm_minutes(text) for text in ("1-12", "1-12:30", "1-12:30:01")]
    [2160, 2190, 2191]

    Raises UsageError for any other text, and for "no limit".
    """
    seconds = parse_span(text, bare_s=60)
    if seconds == 0 or text.strip().upper() in _ENDLESS:  # Slurm reads 0 as "no limit"
        hint = "give a limit: a job without one is never backfilled and waits longest"
        raise UsageError(f"time limit '{text.strip()}' means no limit", hint=hint)
    if seconds is None:
        hint = "write 90 (minutes), 90m, 1h30m, 1:30:00 or 1-12:00:00 (days)"
        raise UsageError(f"'{text}' is not a time limit", hint=hint)
    return math.ceil(seconds / 60)


def clock(seconds: float) -> str:
    """Format a span of time as Slurm does.

    >>> clock(59), clock(18640), clock(90061)
    ('00:00:59', '05:10:40', '1-01:01:01')
    """
    days, rest = divmod(int(seconds), _UNIT_SECONDS["d"])
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text


def parse_seconds(text: str) -> int:
    """Parse a span of time and return seconds, rounded up; a bare number means seconds.

    >>> [parse_seconds(text) for text in ("90", "90s", "30m", "1h30m", "1:30:00", "1d")]
    [90, 90, 1800, 5400, 5400, 86400]

    Raises UsageError for any other text.
    """
    seconds = parse_span(text)
    if seconds is None:
        hint = "write 90 (seconds), 90s, 30m, 1h30m or 1:30:00"
        raise UsageError(f"'{text}' is not a time span", hint=hint)
    return math.ceil(seconds)


def format_seconds(seconds: int) -> str:
    """Format seconds in the largest unit that divides them.

    >>> [format_seconds(seconds) for seconds in (90, 1800, 7200, 86400, 0)]
    ['90s', '30m', '2h', '1d', '0s']
    """
    for unit in "dhm":
        if seconds and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{seconds // _UNIT_SECONDS[unit]}{unit}"
    return f"{seconds}s"
