"""What checks found on many nodes, in few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clusterrun.health.check import Check, Status
from clusterrun.health.compare import differences, merged, named
from clusterrun.shared.typed import decoded

MOST: Final = 16
BAD: Final = (Status.FAIL, Status.NOTE)  # the worst first


@dataclass(frozen=True, kw_only=True)
class NodeFinding:
    """A check with the same result on some nodes, which are in Slurm's notation."""

    nodes: str
    check: Check

    def __str__(self) -> str:
        """Return a line for people."""
        hint = f"; hint: {self.check.hint}" if self.check.hint else ""
        return f"{self.nodes}: {self.check.id}: {self.check.text}{hint}"

    def to_data(self) -> dict[str, str]:
        """Return a mapping for JSON."""
        return {"nodes": self.nodes, **dataclasses.asdict(self.check)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> NodeFinding:
        """Undo `to_data`. Raises ValueError for anything else."""
        return cls(nodes=decoded(str, data.get("nodes")), check=decoded(Check, data))


def findings(checks: Mapping[str, Sequence[Check]]) -> list[NodeFinding]:
    """Merge the notes and failures of nodes, failures first; leave out what is beyond a few."""
    found = [each for each in merged(checks) if each.status in BAD]
    found.sort(key=lambda each: BAD.index(each.status))
    return [
        NodeFinding(
            nodes=named(each.nodes),
            check=Check(id=each.id, status=each.status, text=each.text, hint=each.hint),
        )
        for each in found[:MOST]
    ]


def differing(facts: Mapping[str, Mapping[str, str]]) -> list[NodeFinding]:
    """Return what differs between the nodes whose facts are known."""
    known = {node: found for node, found in facts.items() if found}
    nodes = named(list(known))
    return [
        NodeFinding(nodes=nodes, check=each) for each in differences(known) if each.status in BAD
    ]
