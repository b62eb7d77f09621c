"""From flags, environment and YAML files to a JobSpec whose values know their origin."""

from __future__ import annotations

from clusterrun.loading.load import adopt_spec, load_again, load_spec
from clusterrun.loading.resolved import Resolved
from clusterrun.loading.settings import Origin
from clusterrun.loading.spoken import Given

__all__ = ["Given", "Origin", "Resolved", "adopt_spec", "load_again", "load_spec"]
