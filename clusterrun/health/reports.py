"""What the nodes of a smoke job found: each alone, and all together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from clusterrun.health.storage import mark
from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.finding import Finding
from clusterrun.shared.typed import decoded

DIRECTORY: Final = "health"  # in the run directory
_Result = TypeVar("_Result")
_GROUP: Final = ".group.json"  # no host has such a name


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node found alone. `computed`: by device; None until it has computed."""

    node: str
    checks: tuple[Finding, ...]
    facts: Mapping[str, str]
    computed: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a node measured while all nodes did the same; None is not measured.

    `clock_s`: its clock is so far ahead of the head's. `metadata` and `read`: operations and MB per
    second on the runs' file system; `unseen`: the nodes whose files it does not see there;
    `store_error` if it cannot use it. `sent`: MB per second to `peer`; `link_error` if that failed.
    `reduced_s`: the time of an all-reduce; `reduce_error` if it failed.
    """

    clock_s: float = 0.0
    metadata: float | None = None
    read: float | None = None
    unseen: tuple[str, ...] | None = None
    store_error: str = ""
    peer: str = ""
    sent: float | None = None
    link_error: str = ""
    reduced_s: float | None = None
    reduce_error: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """What the head gathered: `shares` of the nodes that met, `alone`: the head before the others.

    `lost`: nodes that met, and did not answer later. `problem`: why the nodes did not meet.
    `took_s`: from their meeting to this report.
    """

    shares: Mapping[str, Share] = field(default_factory=dict)
    alone: Share = field(default_factory=Share)
    lost: tuple[str, ...] = ()
    problem: str = ""
    took_s: float = 0.0


def write_node(run_dir: Path, report: NodeReport) -> None:
    """Write what a node found so far. Raises OSError."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    mark(directory, report.node)
    write_whole(directory / f"{report.node}.json", json.dumps(dataclasses.asdict(report)))


def write_group(run_dir: Path, report: GroupReport) -> None:
    """Write what the group found. Raises OSError."""
    write_whole(run_dir / DIRECTORY / _GROUP, json.dumps(dataclasses.asdict(report)))


def reported(run_dir: Path) -> set[str]:
    """Return the nodes that have reported."""
    try:
        names = [entry.name for entry in (run_dir / DIRECTORY).iterdir()]
    except OSError:
        return set()
    return {name[:-5] for name in names if name.endswith(".json") and not name.startswith(".")}


def read_nodes(run_dir: Path, besides: Container[str] = ()) -> dict[str, NodeReport]:
    """Return the nodes' reports; leave out damaged ones, and those of `besides`."""
    nodes = (node for node in sorted(reported(run_dir)) if node not in besides)
    found = {node: read_node(run_dir, node) for node in nodes}
    return {node: report for node, report in found.items() if report is not None}


def read_node(run_dir: Path, node: str) -> NodeReport | None:
    """Return a node's report; None if there is none, or it is damaged."""
    data = read_json(run_dir / DIRECTORY / f"{node}.json") or {}
    return _decoded(NodeReport, {**data, "node": node})


def read_group(run_dir: Path) -> GroupReport | None:
    """Return the group's report; None if there is none yet."""
    return _decoded(GroupReport, read_json(run_dir / DIRECTORY / _GROUP))


def _decoded(kind: type[_Result], data: Any) -> _Result | None:
    try:
        found: _Result | None = decoded(kind | None, data)
    except ValueError:
        return None
    return found
