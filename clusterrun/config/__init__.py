"""From flags, environment and YAML files to a JobSpec whose values know their origin."""

from __future__ import annotations

from clusterrun.config.load import adopt_spec, load_again, load_spec
from clusterrun.config.resolved import Resolved
from clusterrun.config.settings import Origin
from clusterrun.config.spoken import Given

__all__ = ["Given", "Origin", "Resolved", "adopt_spec", "load_again", "load_spec"]
