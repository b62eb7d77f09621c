"""The page of each check, for people (`checks.yaml`): agents do not load it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml


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


@functools.cache
def pages() -> Mapping[str, CheckPage]:
    """Return the pages by id: those of the checks of a machine and of Slurm, then those of nodes.

    The order is that of the checks.
    """
    text = Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: CheckPage(**row) for name, row in rows.items()}
