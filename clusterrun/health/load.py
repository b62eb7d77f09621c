"""Read what a machine does now: CPU time, disks, network, and the memory of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from clusterrun.health import cgroup
from clusterrun.health.machine import text_of

NETWORK, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_ETHERNET: Final = "1"  # IP over InfiniBand is counted at its ports
_WORD_BYTES: Final = 4  # which a port counts
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def counts() -> dict[str, float]:
    """Return counters that only grow: seconds of `cpu` time of the job's cgroup, and bytes.

    CPU time is that of the machine if the cgroup does not count it, as are all bytes.
    """
    spent, disks = cgroup.cpu_seconds(), None
    with contextlib.suppress(Exception):  # psutil raises what the machine's files make it raise
        disks = psutil.disk_io_counters()
    of_disks = {"disk_read": disks.read_bytes, "disk_written": disks.write_bytes} if disks else {}
    if spent is None:
        cpu = psutil.cpu_times()
        spent = float(cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq)
    return {"cpu": spent, **of_disks, **_network()}


def _network() -> dict[str, int]:
    """Return the bytes of the network cards; RDMA passes by their interfaces."""
    names = [card for card in NETWORK.glob("*") if card.name != "lo"]
    cards = [card for card in names if (card / "device").exists()] or names
    cards = [card / "statistics" for card in cards if text_of(card / "type") == _ETHERNET]
    ports = [path / "counters" for path in INFINIBAND.glob("*/ports/*")]
    return {
        "received": _sum(cards, "rx_bytes") + _WORD_BYTES * _sum(ports, "port_rcv_data"),
        "sent": _sum(cards, "tx_bytes") + _WORD_BYTES * _sum(ports, "port_xmit_data"),
    }


def _sum(places: Iterable[Path], name: str) -> int:
    return sum(int(text) for place in places if (text := text_of(place / name)).isdigit())


def own_memory(pids: Iterable[int]) -> int:
    """Return the memory that processes hold and share with no file and no other program."""
    found = (text_of(Path(f"/proc/{pid}/statm")).split() for pid in pids)
    return sum((int(row[1]) - int(row[2])) * _PAGE_BYTES for row in found if len(row) > 2)
