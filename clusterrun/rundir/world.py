"""The nodes of an attempt and the ranks on each: `attempts/<n>/world.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import read_json, write_whole

SCHEMA = "clusterrun.world/1"


def write_world(paths: RunPaths, attempt: int, nodes: Sequence[str], procs_per_node: int) -> None:
    """Record the nodes of an attempt, in rank order. Raises OSError."""
    world = {"schema": SCHEMA, "nodes": list(nodes), "procs_per_node": procs_per_node}
    write_whole(paths.world(attempt), json.dumps(world) + "\n")


def read_world(paths: RunPaths, attempt: int) -> tuple[str, ...]:
    """Return the nodes of an attempt in rank order; () until the rendezvous."""
    nodes = (read_json(paths.world(attempt)) or {}).get("nodes", ())
    return tuple(map(str, nodes)) if isinstance(nodes, list) else ()


def ranks_by_node(paths: RunPaths, attempt: int) -> dict[str, range]:
    """Return the ranks of each node; {} until the rendezvous."""
    world = read_json(paths.world(attempt)) or {}
    nodes, procs = world.get("nodes"), world.get("procs_per_node")
    if not isinstance(nodes, list) or not isinstance(procs, int):
        return {}
    return {str(node): range(i * procs, (i + 1) * procs) for i, node in enumerate(nodes)}
