"""The quick checks of a machine that ranks run on: at most 2 s, and no GPU memory is touched.

`doctor` runs them on this machine, each agent before its ranks start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterrun.health import machine, network, paths
from clusterrun.health.check import Look
from clusterrun.launch.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the ranks of a node need; `runs` is the directory of the runs."""

    runs: Path
    ranks: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """Return what a plan's ranks need of each node."""
        return cls(runs=Path(plan.runs_dir), ranks=plan.procs_per_node)


def quick_looks(needs: Needs) -> dict[str, Look]:
    """Return the quick checks by id, those of one domain in a row."""
    return {
        "path.disk": partial(paths.disk, needs.runs),
        "path.inodes": partial(paths.inodes, needs.runs),
        "node.shm": machine.shm,
        "node.files": partial(machine.open_files, needs.ranks),
        "node.memlock": machine.memlock,
        "node.processes": partial(machine.processes, needs.ranks),
        "net.interface": network.interface,
    }
