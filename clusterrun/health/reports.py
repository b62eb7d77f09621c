"""What the ranks of `health.trial` found: each node alone, and all together."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from clusterrun.shared.files import read_json, write_whole
from clusterrun.shared.finding import Finding
from clusterrun.shared.typed import decoded

_Result = TypeVar("_Result")
DIRECTORY: Final = "health"  # in the run directory
_GROUP: Final = ".group.json"  # no host has such a name
STATS: Final = 64  # names asked for one by one, when a cached listing lacks them
SEEN_S: Final = 2.0
PAUSE_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node found alone; `rank` is its first. `is_done`: its script ends.

    `computed`: by device; None until it has computed. The others of the node are in its share.
    """

    node: str
    rank: int = 0
    checks: tuple[Finding, ...]
    facts: Mapping[str, str]
    computed: Mapping[str, Mapping[str, Any]] | None = None
    is_done: bool = False


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a node measured while all nodes did the same; None is not measured.

    `computed`: as in its report, of all ranks. `clock_s`: its clock when all looked. `unseen`: the
    nodes whose files it does not see. `reduced_s`: the time of an all-reduce; `reduce_error` if it
    failed.
    """

    computed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    clock_s: float | None = None
    unseen: tuple[str, ...] | None = None
    reduced_s: float | None = None
    reduce_error: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """What the first rank gathered: `shares` of the nodes that met.

    `lost`: nodes that met, and did not answer later.
    """

    shares: Mapping[str, Share] = field(default_factory=dict)
    lost: tuple[str, ...] = ()


def write_node(run_dir: Path, report: NodeReport) -> None:
    """Write what a node found so far. Raises OSError."""
    directory = run_dir / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    write_whole(directory / f"{report.node}.json", json.dumps(dataclasses.asdict(report)))


def unseen(run_dir: Path, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose reports are not seen, after all have written one; wait for them."""
    deadline, missing = time.monotonic() + SEEN_S, list(nodes)
    while (missing := _unseen(run_dir / DIRECTORY, missing)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return missing


def _unseen(directory: Path, nodes: Sequence[str]) -> list[str]:
    """A listing that is cached may lack some: they are asked for by name, if they are few."""
    try:
        listed = set(os.listdir(directory))
    except OSError:
        return list(nodes)
    missing = [node for node in nodes if f"{node}.json" not in listed]
    gone = [node for node in missing[:STATS] if not (directory / f"{node}.json").exists()]
    return gone + missing[STATS:]


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


def read_nodes(run_dir: Path) -> dict[str, NodeReport]:
    """Return the nodes' reports; leave out damaged ones."""
    found = {node: _read_node(run_dir, node) for node in sorted(reported(run_dir))}
    return {node: report for node, report in found.items() if report is not None}


def _read_node(run_dir: Path, node: str) -> NodeReport | None:
    data = read_json(run_dir / DIRECTORY / f"{node}.json") or {}
    return _decoded(NodeReport, {**data, "node": node})


def has_group(run_dir: Path) -> bool:
    """Return whether the group's report is there."""
    return (run_dir / DIRECTORY / _GROUP).exists()


def read_group(run_dir: Path) -> GroupReport | None:
    """Return the group's report; None if there is none yet."""
    return _decoded(GroupReport, read_json(run_dir / DIRECTORY / _GROUP))


def _decoded(kind: type[_Result], data: Any) -> _Result | None:
    try:
        found: _Result | None = decoded(kind | None, data)
    except ValueError:
        return None
    return found
