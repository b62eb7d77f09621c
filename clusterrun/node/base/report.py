"""What a node reports before the launch, and the launch parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterrun.health.compare import differences
from clusterrun.shared.finding import Finding, Severity
from clusterrun.shared.hostlist import fold_hosts


@dataclass(frozen=True, kw_only=True)
class Report:
    """A node's report before the launch; `problem` is empty if the node is fit.

    `capabilities` are the compute capabilities of the GPUs that it may use, `checks` the notes and
    failures of its preflight, `facts` what should be equal on all nodes.
    """

    node: str
    node_rank: int
    versions: Mapping[str, str]
    capabilities: tuple[tuple[int, int], ...] = ()
    problem: str = ""
    checks: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_bf16(self) -> bool:
        """Return whether every GPU of the node supports bf16 natively."""
        from clusterrun.estimates.gpus import has_bf16  # slow to import; asked only for GPUs

        return bool(self.capabilities) and has_bf16(min(self.capabilities))


@dataclass(frozen=True, kw_only=True)
class LaunchParameters:
    """The launch parameters; `address` is the head's, and `interface` is this node's.

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


def unfit(reports: Iterable[Report]) -> tuple[str, ...]:
    """Return the nodes that failed a check of what is theirs: all nodes share the run directory."""
    return tuple(
        report.node
        for report in reports
        if any(
            each.severity is Severity.FAIL and not each.id.startswith("path.")
            for each in report.checks
        )
    )
