"""Find the speeds of the links between GPUs and to the host, by card and network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clusterrun.config.spec import Network
from clusterrun.estimates.gpus import Gpu

# Assumed shares of the nominal speed in one direction. Published bus bandwidths of nccl-tests are
# close: 230 to 250 GB/s on 8 A100 (of 300), 35 to 45 on 8 H100-PCIe (of 63). See
# docs/plan-accuracy.md.
NVLINK_REACHED: Final = 0.8
PCIE_REACHED: Final = 0.5
FABRIC_REACHED: Final = 0.9
ONE_CARD: Final = 100e9  # bits a second of a node whose GPUs have no network cards of their own
SOCKETS: Final = 25e9  # of a node, over TCP: assumed
EFA_BEFORE_HOPPER: Final = 50e9  # of a GPU: AWS p4d.24xlarge, 400 Gb/s for 8


@dataclass(frozen=True, kw_only=True)
class Links:
    """The real speeds in one direction, in bytes a second.

    `within_node` is that of a GPU to the others of its node, `between_nodes` that of a node to
    other nodes, `to_host` that of a GPU to the host's memory.
    """

    within_node: float
    between_nodes: float
    to_host: float

    def __str__(self) -> str:
        """Return the speeds in GB/s."""
        within, between, host = (
            f"{x / 1e9:.3g} GB/s" for x in (self.within_node, self.between_nodes, self.to_host)
        )
        return f"{within} within a node, {between} between nodes, {host} to the host"


def links_of(
    gpu: Gpu,
    procs_per_node: int,
    *,
    network: Network = Network.AUTO,
    within_node: float | None = None,
    between_nodes: float | None = None,
) -> Links:
    """Return the links of a node with `procs_per_node` GPUs; speeds that are given take precedence.

    >>> from clusterrun.estimates.gpus import find
    >>> print(links_of(find("h100-80g"), 8))
    360 GB/s within a node, 360 GB/s between nodes, 31.5 GB/s to the host
    >>> print(links_of(find("rtx4090"), 4, network=Network.ETHERNET))
    15.8 GB/s within a node, 2.81 GB/s between nodes, 15.8 GB/s to the host
    """
    fabric = FABRIC_REACHED * _node_bits(gpu, procs_per_node, network) / 8
    return Links(
        within_node=within_node
        or (NVLINK_REACHED * gpu.nvlink / 2 if gpu.nvlink else PCIE_REACHED * gpu.pcie),
        between_nodes=between_nodes or fabric,
        to_host=PCIE_REACHED * gpu.pcie,
    )


def _node_bits(gpu: Gpu, procs_per_node: int, network: Network) -> float:
    if network is Network.ETHERNET:
        return SOCKETS
    of_gpu = gpu.fabric
    if network is Network.EFA and gpu.compute_capability < (9, 0):
        of_gpu = min(of_gpu, EFA_BEFORE_HOPPER)
    return procs_per_node * of_gpu or ONE_CARD
