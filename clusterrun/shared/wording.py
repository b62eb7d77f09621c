"""Numbers in sentences."""

from __future__ import annotations


def count(number: int | str, thing: str) -> str:
    """Return a number with its noun; a string is a number that another program formatted.

    >>> count(1, "rank"), count(8, "rank"), count("1", "node"), count("1.2K", "node")
    ('1 rank', '8 ranks', '1 node', '1.2K nodes')
    """
    return f"{number} {thing}" if str(number) == "1" else f"{number} {thing}s"
