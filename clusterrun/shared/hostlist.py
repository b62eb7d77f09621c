"""Parse and fold Slurm host lists and sets of ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from clusterrun.errors import UsageError
from clusterrun.shared.wording import count

_HINT = "write it as Slurm does: node[01-04,7]"
_LONG, _SHOWN = 60, 3  # characters of a list, and nodes of a longer one

MAX_HOSTS = 65_536  # Slurm's own limit for one range (MAX_RANGE, src/common/hostlist.c)
_MAX_DIGITS = 18

_TOKEN = r"(?P<gap>[,\s]+)|\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],\s]+)|(?P<stray>.)"
_RANGE = r"(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?"
_DIGITS = r"([0-9]+)"
_HOST = r"[^\[\],\s]+"
_LAST_NUMBER = r"(?s)(.*?)([0-9]{0,18})([^0-9]*)"
_RANKS = r"(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?|(?P<slice>[0-9]*:[0-9]*(?::[0-9]*)?)"


def parse_hostlist(text: str) -> list[str]:
    """Return the hosts of a Slurm host list in order, with repetitions.

    Text may follow a bracket (Slurm 23.11 and later); the last bracket varies fastest.
    Raises UsageError with the position (from 1) of the first error.

    >>> parse_hostlist("a[001-003,7]-ib,login")
    ['a001-ib', 'a002-ib', 'a003-ib', 'a7-ib', 'login']
    >>> parse_hostlist("r[0-1]n[2-3]")
    ['r0n2', 'r0n3', 'r1n2', 'r1n3']
    """
    hosts = ["".join(parts) for choices in _items(text) for parts in itertools.product(*choices)]
    if not hosts:
        raise UsageError("the host list is empty", hint=_HINT)
    return hosts


def _items(text: str) -> Iterator[list[list[str]]]:
    """Yield the choices for each part of each element: [["a"], ["1", "2"]] for a[1-2]."""
    item: list[list[str]] = []
    for token in re.finditer(_TOKEN, text):
        position = token.start() + 1
        if token["stray"]:
            _refuse(text, f"{token['stray']!r} is unmatched", position)
        if token["gap"] and item:
            yield item
            item = []
        elif token["text"]:
            item.append([token["text"]])
        elif token["ranges"] is not None:
            item.append(_choices(text, token["ranges"], position + 1))
            if math.prod(map(len, item)) > MAX_HOSTS:
                _refuse(text, f"more than {MAX_HOSTS:,} hosts", position)
    if item:
        yield item


def _choices(text: str, ranges: str, position: int) -> list[str]:
    """Return the numbers of a bracket with leading zeros; `position`: where its content begins."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(_RANGE, part)
        if match is None or len(part) > 2 * _MAX_DIGITS:
            _refuse(text, f"{part!r} is neither a number nor a range", position)
        low, high = match["low"], match["high"] or match["low"]
        if int(high) < int(low):
            _refuse(text, f"range {part!r} runs backwards", position)
        if int(high) - int(low) >= MAX_HOSTS - len(numbers):
            _refuse(text, f"more than {MAX_HOSTS:,} hosts", position)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        position += len(part) + 1
    return numbers


def _refuse(text: str, reason: str, position: int) -> NoReturn:
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise UsageError(f"bad host list {shown!r}: {reason} at position {position}", hint=_HINT)


def fold_hostlist(names: Iterable[str]) -> str:
    """Return host names in Slurm's short form; parse_hostlist returns the same list.

    Neighbours that differ in their last number share a bracket. Raises UsageError for text that
    can't be a host name.

    >>> fold_hostlist(["n09", "n10", "n12", "gpu-1-ib", "gpu-2-ib"])
    'n[09-10,12],gpu-[1-2]-ib'
    """
    split = []  # each name as what precedes its last number, the number, and what follows
    for name in names:
        if not re.fullmatch(_HOST, name):
            raise UsageError(f"{name!r} is not a host name")
        split.append(re.fullmatch(_LAST_NUMBER, name).groups())  # type: ignore[union-attr]
    folded = []
    for (before, after), group in itertools.groupby(split, lambda parts: (parts[0], parts[2])):
        numbers = [number for _, number, _ in group]
        if len(numbers) > 1 and numbers[0]:  # "" if the names have no number
            numbers = [f"[{','.join(_ranges(numbers))}]"]
        folded += [f"{before}{number}{after}" for number in numbers]
    return ",".join(folded)


def fold_hosts(names: Iterable[str]) -> str:
    """Return a set of hosts in Slurm's short form, without duplicates, node2 before node10.

    >>> fold_hosts(["n10", "n2", "n1", "n2"])
    'n[1-2,10]'
    """
    return fold_hostlist(sorted(set(names), key=natural_key))


def named(nodes: Sequence[str]) -> str:
    """Return nodes as a host list; their number and the first ones if that is long."""
    folded = fold_hosts(nodes) if len(nodes) > 1 else "".join(nodes)
    if len(folded) <= _LONG or len(nodes) <= _SHOWN:
        return folded
    first = sorted(nodes, key=natural_key)[:_SHOWN]
    return f"{count(len(nodes), 'node')} ({', '.join(first)}, ...)"


def natural_key(name: str) -> tuple[str, str]:
    """Return a key that sorts node2 before node10."""
    return re.sub(_DIGITS, lambda digits: digits[0].zfill(_MAX_DIGITS), name), name


def _ranges(numbers: Iterable[str]) -> Iterator[str]:
    """Yield consecutive numbers of equal width as ranges: 08, 09, 10 as 08-10, but 8, 09 as is."""
    runs: list[list[str]] = []
    for number in numbers:
        last = runs[-1][-1] if runs else ""
        if last and number == str(int(last) + 1).zfill(len(last)):
            runs[-1].append(number)
        else:
            runs.append([number])
    for first, *others in runs:
        yield f"{first}-{others[-1]}" if others else first


def parse_ranks(text: str, world_size: int, *, of: str = "the ranks are") -> frozenset[int]:
    """Parse a set of global ranks: numbers, inclusive ranges, and slices as in Python.

    `of` introduces the existing ranks in an error. Raises UsageError for a rank that does not exist
    and for an empty set.

    >>> sorted(parse_ranks("0,3-5,::8", 20))
    [0, 3, 4, 5, 8, 16]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        ranks.update(_rank_range(part.strip(), world_size, of))
    if not ranks:
        raise UsageError(f"{text!r} selects none of the ranks 0-{world_size - 1}")
    return frozenset(ranks)


def _rank_range(part: str, world_size: int, of: str) -> range:
    """Return the ranks of a slice as in Python, or of a number or an inclusive range."""
    match, numbers = re.fullmatch(_RANKS, part), re.split("[-:]", part)
    if match is None or max(map(len, numbers)) > _MAX_DIGITS:
        raise UsageError(f"{part!r} is not a rank", hint="write ranks as 0,8-15 or ::8")
    if match["slice"]:
        bounds = [int(bound) if bound else None for bound in part.split(":")]
        if bounds[2:] == [0]:
            raise UsageError(f"the step of {part!r} is 0", hint="write ::8 for every eighth rank")
        return range(world_size)[slice(*bounds)]
    low = int(match["low"])
    high = int(match["high"] or low)
    if high < low:
        raise UsageError(f"ranks {part!r} run backwards")
    if high >= world_size:
        raise UsageError(f"rank {high} does not exist; {of} 0-{world_size - 1}")
    return range(low, high + 1)


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks in its shortest form, ascending; "" for an empty set.

    >>> fold_ranks([3, 0, 1, 2, 7])
    '0-3,7'
    """
    return ",".join(_ranges(str(rank) for rank in sorted(set(ranks))))
