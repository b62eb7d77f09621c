"""The page of each check, for people (`checks.yaml`): agents do not load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from clusterrun.health.checks import CheckPage, own_checks


def pages() -> Mapping[str, CheckPage]:
    """Return the pages by id: those of the checks of a machine and of Slurm, then of nodes.

    The order is that of the checks; those with a file of their own are last.
    """
    text = Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    own = {name: each.page for name, each in own_checks().items()}
    return {**{name: CheckPage(**row) for name, row in rows.items()}, **own}
