"""Read what a machine does now: CPU time, disks, network, and the memory of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from clusterrun.health import cgroup

NETWORK, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_ETHERNET: Final = "1"  # IP over InfiniBand is counted at its ports
_WORD_BYTES: Final = 4  # which a port counts
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counters that only grow: seconds of CPU time, and bytes; None: the machine has no count."""

    cpu: float | None
    disk_read: int | None
    disk_written: int | None
    received: int | None
    sent: int | None


def counts() -> Counts:
    """Read the counters: CPU of the job's cgroup, or else of the machine, as all others."""
    spent, disks, (received, sent) = cgroup.cpu_seconds(), None, _network()
    with contextlib.suppress(Exception):  # psutil raises what the machine's files make it raise
        disks = psutil.disk_io_counters()
    return Counts(
        cpu=_machine_cpu() if spent is None else spent,
        disk_read=disks.read_bytes if disks else None,
        disk_written=disks.write_bytes if disks else None,
        received=received,
        sent=sent,
    )


def _machine_cpu() -> float:
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq)


def _network() -> tuple[int, ...]:
    """Return the bytes of the network cards, received and sent; RDMA passes by their interfaces."""
    names = [card for card in NETWORK.glob("*") if card.name != "lo"]
    cards = [card for card in names if (card / "device").exists()] or names
    cards = [card / "statistics" for card in cards if _text(card / "type") == _ETHERNET]
    ports = [path / "counters" for path in INFINIBAND.glob("*/ports/*")]
    ways = (("rx_bytes", "port_rcv_data"), ("tx_bytes", "port_xmit_data"))
    return tuple(_sum(cards, card) + _WORD_BYTES * _sum(ports, port) for card, port in ways)


def _sum(places: Iterable[Path], name: str) -> int:
    return sum(int(text) for place in places if (text := _text(place / name)).isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def own_memory(pids: Iterable[int]) -> int:
    """Return the memory that processes hold and share with no file and no other program."""
    found = (_text(Path(f"/proc/{pid}/statm")).split() for pid in pids)
    return sum((int(row[1]) - int(row[2])) * _PAGE_BYTES for row in found if len(row) > 2)
