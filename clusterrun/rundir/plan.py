"""The plan that all attempts of a run follow: `plan.json`."""

from __future__ import annotations

from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files


def read_plan(paths: RunPaths) -> Plan:
    """Read the plan. Raises OSError, or ValueError if another version of clusterrun wrote it."""
    try:
        return Plan.from_json(files.read_whole(paths.plan))
    except (ValueError, RecursionError) as error:
        files.note_damage(paths.plan)
        raise ValueError(f"plan.json does not fit this version of clusterrun: {error}") from error
