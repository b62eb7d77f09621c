"""Find where a search can match, by literals that every match must contain."""

from __future__ import annotations

from clusterrun.logformat.lines import STAMPED
from clusterrun.logformat.literals import Literals


def holds_any(data: bytes, literals: Literals) -> bool:
    """Return whether the bytes contain one of the literals; True if there are none."""
    return not literals or any(literal in data for literal in literals)


def find_stretches(data: bytes, literals: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """Return lines that contain a literal, each with the lines before it up to one with a head."""
    hits = [(literal, data.find(literal)) for literal in literals]
    found: list[tuple[int, int]] = []
    end = 0
    while hits := [
        (literal, place if place >= end else data.find(literal, end))
        for literal, place in hits
        if place >= 0
    ]:
        place = min((place for _, place in hits if place >= 0), default=-1)
        if place < 0:
            break
        start = data.rfind(b"\n", 0, place) + 1
        while start > end and not STAMPED.match(data, start):
            start = data.rfind(b"\n", 0, start - 1) + 1
        newline = data.find(b"\n", place)
        end = newline + 1 if newline >= 0 else len(data)
        found.append((start, end))
    return found
