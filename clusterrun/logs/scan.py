"""Find where a search can match, by literals that every match must contain."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from clusterrun.logformat.lines import STAMPED

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
else:
    import sre_constants as sre
    import sre_parse as parser

_MAX_LITERALS = 8  # searching for more takes longer than reading the lines

Literals = tuple[bytes, ...]


def required_literals(patterns: Iterable[re.Pattern[bytes]]) -> Literals:
    """Return literals such that each match of a pattern contains one; () if there are none.

    >>> required_literals([re.compile(rb"loss=\\d+"), re.compile(rb"(?:step|epoch) 3")])
    (b'loss=', b'step', b'epoch')
    """
    found: list[bytes] = []
    for pattern in patterns:
        if pattern.flags & re.IGNORECASE:
            return ()
        source: Any = pattern.pattern  # typeshed knows only str patterns
        literals = _required(parser.parse(source, pattern.flags))
        if not literals:
            return ()
        found += literals
    literals = tuple(dict.fromkeys(found))
    return literals if len(literals) <= _MAX_LITERALS else ()


def _required(tree: Any) -> Literals:
    """Return what each match of a sequence contains: its longest run of letters, or a choice."""
    runs: list[bytearray] = [bytearray()]
    choices: list[Literals] = []
    _collect(tree, runs, choices)
    candidates = [(bytes(run),) for run in runs if run] + [choice for choice in choices if choice]
    return max(candidates, key=lambda literals: min(map(len, literals)), default=())


def _collect(tree: Any, runs: list[bytearray], choices: list[Literals]) -> None:
    for kind, value in tree:
        if kind is sre.LITERAL:
            runs[-1].append(value)
        elif kind is sre.SUBPATTERN and not value[1] & re.IGNORECASE:
            _collect(value[3], runs, choices)
        elif kind in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
            pass  # it matches no characters: its neighbours are adjacent
        else:
            runs.append(bytearray())
            choices.append(_choice(kind, value))


def _choice(kind: Any, value: Any) -> Literals:
    if kind is sre.BRANCH:
        found = [_required(alternative) for alternative in value[1]]
        return tuple(literal for literals in found for literal in literals) if all(found) else ()
    if kind in _REPEATS and value[0] > 0:
        return _required(value[2])
    return ()


_REPEATS = tuple(
    getattr(sre, name)
    for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if hasattr(sre, name)
)


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
