"""From flags, environment and YAML files to a JobSpec whose values know their origin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterrun.config.load import Given, adopt_spec, load_again, load_spec
    from clusterrun.config.settings import Origin, Resolved

__all__ = ["Given", "Origin", "Resolved", "adopt_spec", "load_again", "load_spec"]

_HOMES = {"Origin": "settings", "Resolved": "settings"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a node needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'load')}"), name)
