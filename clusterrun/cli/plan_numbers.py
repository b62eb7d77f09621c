"""Write numbers for people."""

from __future__ import annotations

from clusterrun.estimates.inputs import GIB
from clusterrun.estimates.speed import Duration


def gib(size: float) -> str:
    """Write bytes as GiB, with one decimal or, below 1 GiB, two."""
    return f"{size / GIB:,.2f}" if size < GIB else f"{size / GIB:,.1f}"


def number(value: float) -> str:
    """Write a number with three digits, or whole."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def gigabytes(size: float) -> str:
    """Write bytes in the decimal units of disks."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def span(duration: Duration) -> str:
    """Write the middle of a duration in seconds, minutes, hours or days."""
    seconds = duration.mid_s
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} d"


def billions(number: int) -> str:
    """Write a number of parameters."""
    for unit, factor in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= factor:
            return f"{number / factor:.2f}{unit}"
    return str(number)
