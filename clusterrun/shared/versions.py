"""Read version numbers."""

from __future__ import annotations


def parse_version(text: str) -> tuple[int, int] | None:
    """Return the major and minor part of a version; None for any other text."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def dotted(version: tuple[int, int]) -> str:
    """Write a version as `parse_version` reads it."""
    return f"{version[0]}.{version[1]}"
