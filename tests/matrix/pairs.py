"""Choose few cells that hold every pair of values that can go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import combinations

from tests.matrix.cells import ALL, Cell, Refused, Trains, outcome

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(cells: Iterable[Cell]) -> set[Pair]:
    """Return the pairs of values that stand together in a cell."""
    return {pair for cell in cells for pair in combinations(asdict(cell).items(), 2)}


def covering(cells: list[Cell], known: set[Pair]) -> list[Cell]:
    """Return few of the cells, which hold all pairs of them that are not known.

    Each is the one with the most pairs that are left, of equals the first: the same each time.
    """
    bits = {pair: 1 << n for n, pair in enumerate(sorted(pairs(cells) - known))}
    left = {cell: sum(bits.get(pair, 0) for pair in pairs([cell])) for cell in cells}
    found: list[Cell] = []
    while any(left.values()):
        found.append(max(left, key=lambda cell: left[cell].bit_count()))
        covered = left[found[-1]]
        left = {cell: rest & ~covered for cell, rest in left.items()}
    return found


def pairwise() -> list[Cell]:
    """Return cells for all pairs: those that train, and refused ones for what never trains."""
    trained = covering([cell for cell in ALL if isinstance(outcome(cell), Trains)], set())
    refused = [cell for cell in ALL if isinstance(outcome(cell), Refused)]
    return trained + covering(refused, pairs(trained))
