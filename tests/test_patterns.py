"""Twice the text takes a pattern at most three times as long.

The attacks come from the syntax tree of each pattern: what leads to a repeat and what it repeats,
many times. Letters are chosen so that neighbouring classes can share them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import clusterrun
from clusterrun.config import secrets
from clusterrun.diagnosis.table import SignPattern, bounded, built_in
from clusterrun.logformat.literals import parser, sre

compiler = importlib.import_module("re._compiler" if sys.version_info >= (3, 11) else "sre_compile")

ROOMS = ("config.secrets", "diagnosis", "health", "logformat", "logs", "node", "verbs")
ROOMS += ("backends.slurm.reasons",)
LEAST_SIZE = 3_000  # letters
FOLD = 3
TABLE = ("address", "looked up by bash or Hydra", "ordinary values")  # of secrets
TABLE += ("forms", "forms if they look random")
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
PART = dict.fromkeys(REPEATS, 2) | {sre.SUBPATTERN: 3, sre.ASSERT: 1, sre.ASSERT_NOT: 1}
FAVOURITES = ("a1 ", "1a ", " a1")
LETTERS = "".join(map(chr, range(32, 127))) + "\t\n─│╮"
LINEAR = re.compile(r"\w{1,16}-")  # what less time is taken for: it is no sign of anything


def patterns_of(room: str) -> Iterator[tuple[str, re.Pattern[Any]]]:
    for module in pkgutil.walk_packages(clusterrun.__path__, "clusterrun."):
        if f"{module.name}.".startswith(f"clusterrun.{room}.") and "__main__" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, str) and name.isupper() and name.startswith("_"):
                    value = re.compile(value) if any(sign in value for sign in "*+{") else ()
                yield from ((f"{module.name}.{name}", each) for each in inside(value))
    for kind in TABLE if room == "config.secrets" else ():
        for part in secrets._TABLE[kind]:  # each needs only a text as long as its own repeats
            with mock.patch.dict(secrets._TABLE, {kind: [part]}):
                yield f"{kind}: {part}", secrets.pattern.__wrapped__(kind)
    for cause in built_in().values() if room == "diagnosis" else ():
        signs = [(each.text, each.near, each.unless) for each in cause.signs]
        yield from ((cause.id, each) for each in inside([cause.repeats, *signs]))


def inside(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, SignPattern):
        yield value.compiled
    elif isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | dict | frozenset):
        for each in value.values() if isinstance(value, dict) else value:
            yield from inside(each)
    elif isinstance(getattr(value, "pattern", None), re.Pattern):  # such as a Symptom
        yield value.pattern


def attacks(pattern: re.Pattern[Any]) -> set[tuple[str, str]]:
    """Return pairs of a head and of what is repeated after it."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    found = {pair for letters in FAVOURITES for pair in repeats(tree, "", letters)}
    return found | {("", head + pump) for head, pump in found}


def repeats(tree: Any, head: str, letters: str) -> Iterator[tuple[str, str]]:
    for kind, value in tree:
        if kind in REPEATS and value[1] > value[0] + 8:
            yield head, sample(value[2], letters)
        for each in parts(kind, value):
            yield from repeats(each, head, letters)
        head += sample([(kind, value)], letters)


def parts(kind: Any, value: Any) -> Any:
    return value[1] if kind is sre.BRANCH else [value[PART[kind]]] if kind in PART else []


def sample(tree: Any, letters: str) -> str:
    """Return a text that a part of a pattern matches."""
    return "".join(_sample(kind, value, letters) for kind, value in tree)


def _sample(kind: Any, value: Any, letters: str) -> str:
    if kind in REPEATS:
        return sample(value[2], letters) * max(value[0], min(1, value[1]))
    if kind in (sre.BRANCH, sre.SUBPATTERN) or (kind is sre.ASSERT and value[0] < 0):
        return sample(parts(kind, value)[0], letters)
    if kind is sre.LITERAL:
        return chr(value)
    if kind in (sre.ANY, sre.NOT_LITERAL, sre.IN):
        one = compiler.compile(parser.SubPattern(parser.State(), [(kind, value)]))
        return next(filter(one.fullmatch, letters + LETTERS), "")
    return ""


def size_for(pattern: re.Pattern[Any]) -> int:
    """Return a length that is more than each bounded repeat takes."""
    bounds = re.findall(r"\{\d*,(\d+)\}", str(pattern.pattern))
    return max(LEAST_SIZE, *(3 * int(bound) for bound in bounds), 0)


def cost(pattern: re.Pattern[Any], head: str, pump: str, size: int) -> float:
    text: Any = head + pump * (size // len(pump)) + "\0"
    text = text.encode() if isinstance(pattern.pattern, bytes) else text
    began = time.process_time()
    for _ in pattern.finditer(text):
        pass
    return time.process_time() - began


def is_slow(pattern: re.Pattern[Any]) -> tuple[str, str] | None:
    """Return an attack that takes more time than its length allows, at each of several tries."""
    size = size_for(pattern)
    least = cost(LINEAR, "", "a", size)
    for head, pump in filter(lambda pair: pair[1], attacks(pattern)):
        for _ in range(4):
            taken = cost(pattern, head, pump, 2 * size)
            if taken <= FOLD * least or taken <= FOLD * cost(pattern, head, pump, size):
                break
        else:
            return head, pump
    return None


@pytest.mark.parametrize("room", ROOMS)
def test_no_text_takes_a_pattern_more_time_than_its_length(room: str) -> None:
    found = {pattern: name for name, pattern in patterns_of(room)}
    assert found
    slow = {name: hit for pattern, name in found.items() if (hit := is_slow(pattern))}
    assert not slow


@pytest.mark.parametrize("text", ["fail.*retry", r"step\w*:"])
def test_an_unbounded_pattern_is_slow_and_a_table_bounds_it(text: str) -> None:
    assert is_slow(re.compile(text))
    assert not is_slow(bounded(text))
