"""The nodes of an attempt and the ranks on each: `attempts/<n>/world.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

SCHEMA = "clusterrun.world/1"
MOST_RANKS = 1 << 12  # of a node


def write_world(paths: RunPaths, attempt: int, nodes: Sequence[str], procs_per_node: int) -> None:
    """Record the nodes of an attempt, in rank order. Raises OSError."""
    world = _World(nodes=tuple(nodes), procs_per_node=procs_per_node)
    files.write_whole(paths.world(attempt), reading.as_text(world, SCHEMA))


def read_world(paths: RunPaths, attempt: int) -> tuple[str, ...]:
    """Return the nodes of an attempt in rank order; () until the rendezvous."""
    return _read(paths, attempt).nodes


def ranks_by_node(paths: RunPaths, attempt: int) -> dict[str, range]:
    """Return the ranks of each node; {} until the rendezvous."""
    world = _read(paths, attempt)
    procs = world.procs_per_node
    return {node: range(i * procs, (i + 1) * procs) for i, node in enumerate(world.nodes)}


@dataclass(frozen=True, kw_only=True)
class _World:
    nodes: tuple[str, ...] = ()
    procs_per_node: int = 0


def _read(paths: RunPaths, attempt: int) -> _World:
    found = reading.read(paths.world(attempt), _World, SCHEMA) or _World()
    if any("/" in node for node in found.nodes) or not 0 <= found.procs_per_node <= MOST_RANKS:
        files.note_damage(paths.world(attempt))  # a node's name is part of paths
        return _World()
    return found
