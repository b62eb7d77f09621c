"""This machine's name and interfaces."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

import psutil

from clusterrun.health.machine import INFINIBAND
from clusterrun.shared.finding import Finding, bad, note, ok

MOST: Final = 6  # interfaces that are named


def own_name() -> Finding:
    """Resolve the name of this machine."""
    name, host = "net.name", socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        text = f"the name of this machine, {host}, does not resolve: {error.strerror}"
        return note(name, text, f"add it to /etc/hosts: 127.0.1.1 {host}")
    return ok(name, f"{host} is {address}")


def interface(machines: int) -> Finding:
    """Look for an interface other than loopback that is up, and for ports that are down.

    A job of several machines needs one.
    """
    name, cards = "net.interface", psutil.net_if_stats()
    found = sorted(card for card, stats in cards.items() if stats.isup and card != "lo")
    ports = infiniband()
    active = [port for port, state in ports.items() if state == "ACTIVE"]
    if not found:
        text = "no interface but loopback is up"
        return bad(name, text, "list the interfaces: ip -brief link", is_sure=machines > 1)
    more = [f"{len(found) - MOST} more"] if len(found) > MOST else []
    text = f"up: {', '.join([*found[:MOST], *more, *active])}"
    if active and (
        down := [f"{port} is {state}" for port, state in ports.items() if port not in active]
    ):
        return note(name, f"{text}; {', '.join(down)}", "look at the ports with: ibstat")
    return ok(name, text)


def infiniband() -> dict[str, str]:
    """Return the state of each port of InfiniBand: {"mlx5_0/1": "ACTIVE"}."""
    files = sorted(INFINIBAND.glob("*/ports/*/state"))
    texts = {f"{file.parts[-4]}/{file.parts[-2]}": text_of(file) for file in files}
    return {port: text.rpartition(":")[2].strip() for port, text in texts.items() if text}


def text_of(path: Path) -> str:
    """Return the text of a small file of the kernel; "" if it can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""
