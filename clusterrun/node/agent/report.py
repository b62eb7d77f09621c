"""What a node says of itself before the launch, and what the head concludes for all nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.estimates.gpus import has_bf16


@dataclass(frozen=True, kw_only=True)
class Report:
    """One node before the launch; `problem` is empty for a node that is fit.

    `capabilities` are the compute capabilities of the GPUs that it may use.
    """

    node: str
    node_rank: int
    versions: Mapping[str, str]
    capabilities: tuple[tuple[int, int], ...] = ()
    problem: str = ""

    @property
    def has_bf16(self) -> bool:
        """Say whether every GPU of the node computes in bf16 natively."""
        return bool(self.capabilities) and has_bf16(min(self.capabilities))

    def to_data(self) -> dict[str, Any]:
        """Write the report as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Report:
        """Read what `to_data` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            node=str(data["node"]),
            node_rank=int(data["node_rank"]),
            versions={str(name): str(text) for name, text in dict(data["versions"]).items()},
            capabilities=tuple((int(a), int(b)) for a, b in data["capabilities"]),
            problem=str(data["problem"]),
        )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all nodes launch with; address and interface are this node's view of the head."""

    address: str
    port: int
    interface: str
    precision: str


def problems(reports: Sequence[Report]) -> list[str]:
    """List what keeps these nodes from training together, each with the nodes' names."""
    unfit = [f"{report.node}: {report.problem}" for report in reports if report.problem]
    libraries = sorted({name for report in reports for name in report.versions})
    return unfit + [text for name in libraries if (text := _difference(name, reports))]


def _difference(library: str, reports: Sequence[Report]) -> str:
    nodes = _grouped(reports, lambda report: report.versions.get(library, "") or "missing")
    if len(nodes) == 1:
        return ""
    parts = [f"{version} on {', '.join(names)}" for version, names in nodes.items()]
    return f"{library} differs between nodes: {'; '.join(parts)}"


def precision_problem(precision: str, reports: Sequence[Report]) -> str:
    """Say which nodes can't compute in the precision that the head chose; empty: all can."""
    if precision != "bf16":
        return ""
    unable = [report.node for report in reports if not report.has_bf16]
    text = f"the head node chose bf16, which the GPUs of {', '.join(unable)} do not have"
    return f"{text}; give --mixed-precision fp16" if unable else ""


def _grouped(reports: Iterable[Report], key: Callable[[Report], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report.node)
    return groups
