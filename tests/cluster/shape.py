"""What a test cluster looks like, and every name, address, port and path that follows from it."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tests.cluster.newer import NewerSlurm

FIRST_NODE_OFFSET = 256


def own_slot(number: int = 0) -> int:
    """Return one of the ten slots of this test process: each xdist worker has its own clusters."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return int(os.environ.get("CLUSTERRUN_CLUSTER_SLOT", "0")) + 10 * int(worker) + number


def default_state_dir(slot: int) -> Path:
    """Return where the cluster in `slot` keeps everything, when nothing else is asked for."""
    base = os.environ.get("CLUSTERRUN_CLUSTER_DIR", "/tmp/clusterrun-cluster")
    return Path(base if slot == 0 else f"{base}-{slot}")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size and kind of one cluster.

    Clusters in different slots live side by side: node names, addresses, ports and devices differ.
    """

    state_dir: Path
    nodes: int = 4
    gpus_per_node: int = 4
    cpus_per_node: int = 64
    mem_mib_per_node: int = 512_000
    accounting: bool = True
    slot: int = 0
    slurmd_timeout_s: int = 45  # well above the 20 s for which a cut cable must be survived
    memory_limit: Literal["", "cgroup"] = ""  # how --mem is enforced, if it is
    only_associations: bool = False  # accounts that are not registered are refused
    newer_slurm: Path | None = None  # the folder of a newer Slurm; None: the system's

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return node1, node2, … (s1node1, s1node2, … in slot 1)."""
        prefix = "node" if self.slot == 0 else f"s{self.slot}node"
        return tuple(f"{prefix}{number}" for number in range(1, self.nodes + 1))

    @property
    def network(self) -> ipaddress.IPv4Network:
        """Return the private network of the bridge."""
        return ipaddress.IPv4Network(f"10.{77 + self.slot}.0.0/16")

    @property
    def head_address(self) -> str:
        """Return the address of the login side, where slurmctld listens."""
        return str(self.network[1])

    @property
    def head_host(self) -> str:
        """Return this machine's own host name, which slurmctld insists on."""
        return socket.gethostname().split(".")[0]

    @property
    def bridge(self) -> str:
        """Return the name of the bridge that joins the nodes and the login side."""
        return f"clusterrun{self.slot}"

    @property
    def ctld_port(self) -> int:
        """Return the port of slurmctld."""
        return 5817 + 10 * self.slot  # not that of a Slurm which this machine may have

    @property
    def slurmd_port(self) -> int:
        """Return the port of each slurmd."""
        return 5818 + 10 * self.slot

    @property
    def dbd_port(self) -> int:
        """Return the port of slurmdbd."""
        return 5819 + 10 * self.slot

    @property
    def device_dir(self) -> Path:
        """Return where the stand-ins for GPU device files are."""
        return Path(f"/dev/{self.bridge}")

    @property
    def slurm_conf(self) -> Path:
        """Return the file that SLURM_CONF names."""
        return self.state_dir / "slurm.conf"

    @property
    def newer(self) -> NewerSlurm | None:
        """Return the newer Slurm that this cluster is made of; None: it is the system's."""
        return None if self.newer_slurm is None else NewerSlurm(prefix=self.newer_slurm)

    def path(self, rest: str) -> str:
        """Return PATH with this cluster's own Slurm before the rest."""
        return f"{self.newer.programs}:{rest}" if self.newer else rest

    def number(self, node: str) -> int:
        """Return 1 for the first node."""
        return self.node_names.index(node) + 1

    def address(self, node: str) -> str:
        """Return the node's own address on the bridge."""
        return str(self.network[FIRST_NODE_OFFSET + self.number(node)])

    def mac_address(self, node: str) -> str:
        """Return the hardware address, which a node keeps when it is powered off and on."""
        number = self.number(node)
        return f"02:c0:{self.slot:02x}:00:{number >> 8:02x}:{number & 0xFF:02x}"

    def netns(self, node: str) -> str:
        """Return the name of the node's network namespace."""
        return f"{self.bridge}-{node}"

    def uts_file(self, node: str) -> Path:
        """Return the file that holds the node's host-name namespace."""
        return self.state_dir / "uts" / node

    def cable(self, node: str) -> str:
        """Return the bridge's end of the node's cable (an interface name of at most 15 bytes)."""
        return f"cr{self.slot}n{self.number(node)}"

    def to_json(self) -> str:
        """Return the text of cluster.json."""
        return json.dumps(asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> Shape:
        """Return the shape that cluster.json tells of."""
        known = json.loads(text)
        paths = {
            name: Path(known[name]) for name in ("state_dir", "newer_slurm") if known.get(name)
        }
        return cls(**{**known, **paths})
