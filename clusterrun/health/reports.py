"""What the ranks of `health.trial` found: a file for each node, and who has met."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.finding import Finding
from clusterrun.shared.typed import decoded

DIRECTORY: Final = "health"  # in the run directory
_GROUP: Final = ".group.json"  # no host has such a name


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node found. `is_done`: its script ends.

    `computed`: by device; None until it has computed. `has_measured`: with the others, after they
    met. `reduced_s`: the time of an all-reduce; `reduce_error` if it failed.
    """

    node: str
    checks: tuple[Finding, ...]
    facts: Mapping[str, str]
    computed: Mapping[str, Mapping[str, Any]] | None = None
    has_measured: bool = False
    reduced_s: float | None = None
    reduce_error: str = ""
    is_done: bool = False


def write_node(run_dir: Path, report: NodeReport) -> None:
    """Write what a node found so far. Raises OSError."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    write_whole(directory / f"{report.node}.json", json.dumps(dataclasses.asdict(report)))


def read_nodes(run_dir: Path) -> dict[str, NodeReport]:
    """Return the nodes' reports; leave out damaged ones."""
    found: dict[str, NodeReport] = {}
    for path in sorted((run_dir / DIRECTORY).glob("[!.]*.json")):
        try:
            found[path.stem] = decoded(NodeReport, {**(read_json(path) or {}), "node": path.stem})
        except ValueError:
            continue
    return found


def write_group(run_dir: Path, nodes: Iterable[str]) -> None:
    """Write which nodes have met. Raises OSError."""
    write_whole(run_dir / DIRECTORY / _GROUP, json.dumps({"nodes": list(nodes)}))


def read_group(run_dir: Path) -> tuple[str, ...] | None:
    """Return the nodes that have met; None if that is not known yet."""
    found = read_json(run_dir / DIRECTORY / _GROUP)
    return tuple(found["nodes"]) if found else None
