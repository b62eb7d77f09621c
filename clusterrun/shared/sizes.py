"""Parse and format amounts: bytes (64KiB, 200G as in Slurm, 1GB), counts (16k, 8B)."""

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
