"""What a node reports before the launch, and the launch parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterrun.health.compare import differences
from clusterrun.shared.finding import Finding, Severity
from clusterrun.shared.hostlist import fold_hosts


@dataclass(frozen=True, kw_only=True)
class Report:
    """A node's report before the launch; `problem` is empty if the node is fit.

    `capabilities` are the compute capabilities of the GPUs that it may use, `checks` the notes and
    failures of its preflight, `facts` what should be equal on all nodes. Only the first node gives
    `port` and `variables`, as LaunchParameters has them.
    """

    node: str
    node_rank: int
    versions: Mapping[str, str]
    capabilities: tuple[tuple[int, int], ...] = ()
    problem: str = ""
    checks: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LaunchParameters:
    """The launch parameters; `address` is the first node's, and `interface` is this node's.

    `variables` is what `accelerate launch` adds to the environment of node 0's first rank, empty if
    each node starts `accelerate launch` itself.
    """

    address: str
    port: int
    interface: str
    precision: str
    variables: Mapping[str, str] = field(default_factory=dict)


def problems(reports: Sequence[Report]) -> list[str]:
    """Return the problems that keep these nodes from training together, with node names."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        nodes[report.problem].append(report.node)
    unfit = [f"{fold_hosts(names)}: {problem}" for problem, names in nodes.items() if problem]
    versions = {
        each.node: {f"versions.{k}": v for k, v in each.versions.items()} for each in reports
    }
    broken = [each.text for each in differences(versions) if each.severity is Severity.FAIL]
    return [*unfit, *(f"versions differ between nodes: {text}" for text in broken)]
