"""Slurm's filename patterns: `out-%j-%4t.log` and which files came of it.

From sbatch(1) and srun(1), "filename pattern", and slurmstepd's fname.c (Slurm 22.05 to 25.05).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_WIDTH = 10

_SYMBOL = re.compile(r"%(?:%|(?P<width>[0-9]*)(?P<letter>[a-zA-Z]))")
# What differs from task to task or is nobody's to know: as a glob, and as an expression.
_OPEN = {
    "t": ("*", "[0-9]+"),
    "n": ("*", "[0-9]+"),
    "N": ("*", "[^/]+"),
    "s": ("*", "[^/]+"),
    "r": ("*", "[0-9]+"),
}
_NUMERIC = frozenset("jAar")


@dataclass(frozen=True, kw_only=True)
class PatternFile:
    """A file that a pattern names, and what the pattern's symbols were; None where it has none."""

    path: Path
    task: int | None
    node: str | None
    node_index: int | None


def find_pattern_files(
    pattern: str, symbols: Mapping[str, str], directory: Path
) -> list[PatternFile]:
    """List the regular files that a pattern names, one in `directory` where it is relative.

    `symbols` are those with one value, by letter; all other text of the pattern is literal.
    """
    if not pattern or "\0" in pattern:
        return []
    wildcard, expression = _translated(pattern, symbols)
    base = os.path.join(glob.escape(str(directory)), wildcard)
    matcher = re.compile(re.escape(os.path.join(str(directory), "")) + expression)
    if os.path.isabs(wildcard):
        matcher = re.compile(expression)
    found = []
    for name in sorted(glob.glob(base)):
        match = matcher.fullmatch(name)
        if match is not None and os.path.isfile(name):
            found.append(_pattern_file(name, match.groupdict()))
    return found


def expand_pattern(pattern: str, symbols: Mapping[str, str]) -> str:
    """Replace the symbols of a pattern that have one value; the others stay as they are.

    >>> expand_pattern("%x-%5j-%t.out", {"j": "128", "x": "gpt"})
    'gpt-00128-%t.out'
    """
    if "\\" in pattern:  # it switches all symbols off, and is left out itself
        return pattern.replace("\\", "")
    return _SYMBOL.sub(lambda match: _value(match, symbols) or match[0], pattern)


def _pattern_file(name: str, groups: Mapping[str, str | None]) -> PatternFile:
    task, index = groups.get("t"), groups.get("n")
    return PatternFile(
        path=Path(name),
        task=int(task) if task else None,
        node=groups.get("N"),
        node_index=int(index) if index else None,
    )


def _translated(pattern: str, symbols: Mapping[str, str]) -> tuple[str, str]:
    """Write a pattern as a glob and as a regular expression with a group for each open symbol."""
    if "\\" in pattern:  # it switches all symbols off, and is left out itself
        plain = pattern.replace("\\", "")
        return glob.escape(plain), re.escape(plain)
    wildcard, expression, end = "", "", 0
    seen: set[str] = set()
    for match in _SYMBOL.finditer(pattern):
        literal = pattern[end : match.start()]
        one, other = _symbol(match, symbols, seen)
        wildcard += glob.escape(literal) + one
        expression += re.escape(literal) + other
        end = match.end()
    return wildcard + glob.escape(pattern[end:]), expression + re.escape(pattern[end:])


def _symbol(match: re.Match[str], symbols: Mapping[str, str], seen: set[str]) -> tuple[str, str]:
    letter = match["letter"]
    if letter == "J" and "j" in symbols:  # with the step: 4711.0
        job = symbols["j"].zfill(_width(match))
        return f"{job}*", re.escape(job) + r"(?:\.[^/]+)?"
    value = _value(match, symbols)
    if value is not None or letter not in _OPEN:
        text = match[0] if value is None else value
        return glob.escape(text), re.escape(text)
    wildcard, expression = _OPEN[letter]
    if letter in seen:  # a group's name may stand once
        return wildcard, expression
    seen.add(letter)
    return wildcard, f"(?P<{letter}>{expression})"


def _value(match: re.Match[str], symbols: Mapping[str, str]) -> str | None:
    if match[0] == "%%":
        return "%"
    value = symbols.get(match["letter"])
    if value is not None and match["letter"] in _NUMERIC:
        return value.zfill(_width(match))
    return value


def _width(match: re.Match[str]) -> int:
    return min(int(match["width"] or 0), MAX_WIDTH)
