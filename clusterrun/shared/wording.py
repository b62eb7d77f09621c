"""Parts of sentences, and numbers of versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count(number: int | str, thing: str) -> str:
    """Return a number with its noun; a string is a number that another program formatted.

    >>> count(1, "rank"), count(8, "rank"), count("1", "node"), count("1.2K", "node")
    ('1 rank', '8 ranks', '1 node', '1.2K nodes')
    """
    return f"{number} {thing}" if str(number) == "1" else f"{number} {thing}s"


def missing_text(python: str, packages: Sequence[str], needed_by: str = "") -> str:
    """Say which packages an interpreter lacks.

    >>> missing_text("/p", ["torch", "accelerate"])
    '/p has no torch or accelerate'
    """
    names = f"{', '.join(packages[:-1])} or {packages[-1]}" if packages[1:] else packages[0]
    return f"{python} has no {names}{f', which {needed_by} needs' if needed_by else ''}"


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate closest to the name, if any is close.

    >>> nearest("gpus_per_nodes", ["gpus_per_node", "nodes"])
    'gpus_per_node'
    """
    import difflib  # only after a mistake

    found = difflib.get_close_matches(name, list(candidates), n=1)
    return found[0] if found else None


def parse_version(text: str) -> tuple[int, int] | None:
    """Return the major and minor part of a version; None for any other text."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def dotted(version: tuple[int, int]) -> str:
    """Write a version as `parse_version` reads it."""
    return f"{version[0]}.{version[1]}"
