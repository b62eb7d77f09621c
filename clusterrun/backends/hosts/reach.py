"""Whether the processes of one host reach the ports of another."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from clusterrun.backends.hosts.judge import Order, Problem
from clusterrun.node.base.ports import listening_socket

CONNECT_S: Final = 3.0


def listen(ports: tuple[int, ...]) -> socket.socket:
    """Listen on the first free port; `getsockname()` has it. Raises OSError if none is free."""
    last = OSError("no port to try")
    for port in ports:
        try:
            return listening_socket(port)
        except OSError as error:
            last = error
    raise last


def can_connect(address: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Return why a port is not reached; "" if it is."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        return error.strerror or str(error) or "no answer"
    return ""


def closed(hosts: Sequence[str], to: str, port: int, reason: str) -> Problem:
    """Explain that hosts do not reach a port of another."""
    text = f"port {port} of {to} cannot be reached ({reason})"
    hint = "open a range of ports between the hosts, and pass it with --port-range LOW-HIGH"
    return Problem(hosts=tuple(hosts), text=text, hint=hint, order=Order.CLOSED_PORTS)
