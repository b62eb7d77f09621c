"""The quick checks of a machine that ranks run on: at most 2 s, and no GPU memory is touched.

`doctor` runs them on this machine, each agent before its ranks start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterrun.health import machine, network, paths, site
from clusterrun.health.check import Look
from clusterrun.launch.plan import DEFAULT_PORTS, Plan


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the ranks of a node need; `runs` is the directory of the runs.

    `health_command` gives the site's own verdict, within `health_command_s`.
    """

    runs: Path
    ranks: int = 1
    ports: tuple[int, int] = DEFAULT_PORTS
    health_command: str = ""
    health_command_s: float = 10.0

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """Return what a plan's ranks need of each node."""
        return cls(
            runs=Path(plan.runs_dir),
            ranks=plan.procs_per_node,
            ports=plan.port_range,
            health_command=plan.health_command,
        )


def quick_looks(needs: Needs) -> dict[str, Look]:
    """Return the quick checks by id, those of one domain in a row."""
    return {
        "path.disk": partial(paths.disk, needs.runs),
        "path.inodes": partial(paths.inodes, needs.runs),
        "node.shm": machine.shm,
        "node.files": partial(machine.open_files, needs.ranks),
        "node.memlock": machine.memlock,
        "node.processes": partial(machine.processes, needs.ranks),
        **_verdict_of_site(needs),  # the last of its domain: it may be late
        "net.interface": network.interface,
    }


def all_looks(needs: Needs) -> dict[str, Look]:
    """Return all checks of a machine by id: also those that may be slow."""
    return {
        **quick_looks(needs),
        "net.name": network.own_name,
        "net.ports": partial(network.free_ports, *needs.ports),
    }


def _verdict_of_site(needs: Needs) -> dict[str, Look]:
    if not needs.health_command:
        return {}
    return {site.NAME: partial(site.site_verdict, needs.health_command, needs.health_command_s)}
