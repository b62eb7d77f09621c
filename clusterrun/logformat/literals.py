"""Find literals that every match of a pattern contains, so that most text need not be matched."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Final

try:
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as sre
    import sre_parse as parser

MOST: Final = 8  # searching for more takes longer than reading the lines

Literals = tuple[bytes, ...]


@functools.cache
def literals_of(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Return texts of which each match contains one, but for letter case; () if there are none."""
    source: Any = pattern.pattern.encode()
    found = _required(parser.parse(source, pattern.flags & ~re.UNICODE))  # bytes refuse that flag
    return tuple(text.decode(errors="replace") for text in found)


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
    return literals if len(literals) <= MOST else ()


def _required(tree: Any) -> Literals:
    """Return what each match of a sequence contains: its longest run of letters, or a choice."""
    runs: list[bytearray] = [bytearray()]
    choices: list[Literals] = []
    _collect(tree, runs, choices)
    candidates = [(bytes(run),) for run in runs if run] + [choice for choice in choices if choice]
    # A choice is worth as much as its shortest text.
    return max(candidates, key=lambda literals: min(map(len, literals)), default=())


def _collect(tree: Any, runs: list[bytearray], choices: list[Literals]) -> None:
    """Add literals to the last of `runs`; anything else ends that run and is one of `choices`."""
    for kind, value in tree:
        if kind is sre.LITERAL:
            runs[-1].append(value)
        elif kind is sre.SUBPATTERN and not value[1] & re.IGNORECASE:  # 1: flags, 3: its tree
            _collect(value[3], runs, choices)
        elif kind in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
            pass  # it matches no characters: its neighbours are adjacent
        else:
            runs.append(bytearray())
            choices.append(_choice(kind, value))


def _choice(kind: Any, value: Any) -> Literals:
    """Return literals of which a branch or a repeat contains one; () if it need not contain any."""
    if kind is sre.BRANCH:
        found = [_required(alternative) for alternative in value[1]]
        return tuple(literal for literals in found for literal in literals) if all(found) else ()
    if kind.name.endswith("_REPEAT") and value[0] > 0:  # value: least, most, tree
        return _required(value[2])
    return ()
