"""Parse and format amounts of bytes: 64KiB, 200G as Slurm means it, 1GB."""

from __future__ import annotations

import re
from typing import Final

from clusterrun.errors import UsageError

_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([a-z]*)\Z", re.ASCII | re.IGNORECASE)
_BINARY: Final = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_UNIT_BYTES: Final = {
    **{"": 1, "b": 1},
    **{unit.lower(): size for unit, size in _BINARY.items()},
    **{unit[0].lower(): size for unit, size in _BINARY.items()},  # Slurm's --mem: 1024, too
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, or one with a unit in any case.

    >>> [parse_bytes(text) for text in ("4096", "64KiB", "200G", "1 GB")]
    [4096, 65536, 214748364800, 1000000000]

    Raises UsageError for anything else.
    """
    match = _SIZE.match(text.strip())
    size = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or size is None:
        raise UsageError(f"'{text}' is not a size", hint="write 4096 (bytes), 64KiB, 200M or 1GiB")
    return int(match[1]) * size


def format_bytes(size: int) -> str:
    """Format bytes in the largest binary unit that divides them.

    >>> [format_bytes(size) for size in (1 << 30, 3 << 9, 1000, 0)]
    ['1GiB', '1536', '1000', '0']
    """
    for unit, factor in _BINARY.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
