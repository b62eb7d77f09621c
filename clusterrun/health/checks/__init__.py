"""Checks of a machine that have a file each in this directory: a decorated function and its page.

A file is enough to add one: `doctor`, the nodes, `explain` and the reference take it from here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from clusterrun.shared.finding import Finding

if TYPE_CHECKING:
    from clusterrun.health.node import Needs


@dataclass(frozen=True, kw_only=True)
class CheckPage:
    """What a check looks at, when it `fails` or `notes` something, and what to do then.

    `why`: what happens to a training. A check that never fails, or never notes, has "".
    """

    looks_at: str
    fails: str = ""
    notes: str = ""
    why: str
    fix: Sequence[str]


class OwnCheck(NamedTuple):
    """A check with its page; a quick one is also part of the preflight."""

    look: Callable[[Needs], Finding]
    page: CheckPage
    is_quick: bool


_CHECKS: Final[dict[str, OwnCheck]] = {}
_Look = Callable[["Needs"], Finding]


def check(name: str, page: CheckPage, *, is_quick: bool = False) -> Callable[[_Look], _Look]:
    """Add a check; `name` is its id."""

    def register(look: _Look) -> _Look:
        _CHECKS[name] = OwnCheck(look, page, is_quick)
        return look

    return register


def own_checks() -> Mapping[str, OwnCheck]:
    """Return the checks of all files by id."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _CHECKS


def pages() -> Mapping[str, CheckPage]:
    """Return the pages of all checks by id (`checks.yaml`), those with a file of their own last.

    The order is that of the checks: of a machine and of Slurm, then of nodes.
    """
    import yaml  # agents load no pages

    text = Path(__file__).parents[1].joinpath("checks.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    own = {name: each.page for name, each in own_checks().items()}
    return {**{name: CheckPage(**row) for name, row in rows.items()}, **own}
