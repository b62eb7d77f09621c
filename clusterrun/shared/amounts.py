"""Parse and format amounts: bytes (64KiB, 200G as in Slurm, 1GB), counts (16k, 8B), spans of time.

A span is 90s, 1h30m or 1.5h, or has one of the six formats of Slurm's limits.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

from clusterrun.errors import UsageError

_SIZE: Final = r"(?ai)([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*)\Z"
_COUNT: Final = r"(?ai)([0-9]{1,15}(?:\.[0-9]{0,15})?(?:e[+-]?[0-9]{1,3})?)\s*([kmbt]?)\Z"
_COUNT_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BINARY: Final = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_UNIT_BYTES: Final = {
    **{"": 1, "b": 1},
    **{unit.lower(): size for unit, size in _BINARY.items()},
    **{unit[0].lower(): size for unit, size in _BINARY.items()},  # Slurm's --mem also uses 1024
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
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


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, with or without a unit in any case; round up to whole bytes.

    >>> [parse_bytes(text) for text in ("4096", "64KiB", "1.5g", "1 GB")]
    [4096, 65536, 1610612736, 1000000000]

    Raises UsageError for anything else.
    """
    match = re.match(_SIZE, text.strip())
    size = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or size is None:
        raise UsageError(f"'{text}' is not a size", hint="write 4096 (bytes), 64KiB, 200M or 1GiB")
    return math.ceil(Decimal(match[1]) * size)


def parse_count(text: str) -> Decimal | None:
    """Parse a number with an optional k (1,000), M, B or T in either case; None for other text.

    >>> [int(parse_count(text)) for text in ("8", "1_000", "16k", "1.2M", "8b", "8.03e9")]
    [8, 1000, 16000, 1200000, 8000000000, 8030000000]
    """
    match = re.match(_COUNT, text.strip().replace("_", ""))
    return Decimal(match[1]) * _COUNT_UNITS[match[2].lower()] if match else None


def format_bytes(size: int) -> str:
    """Format bytes in the largest binary unit that divides them.

    >>> [format_bytes(size) for size in (1 << 30, 3 << 9, 1000, 0)]
    ['1GiB', '1536', '1000', '0']
    """
    for unit, factor in _BINARY.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


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
