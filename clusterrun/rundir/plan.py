"""The plan that all attempts of a run follow: `plan.json`."""

from __future__ import annotations

from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths


def read_plan(paths: RunPaths) -> Plan:
    """Read the plan. Raises OSError, or ValueError if another version of clusterrun wrote it."""
    try:
        return Plan.from_json(paths.plan.read_text())
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"plan.json does not fit this version of clusterrun: {error}") from error
