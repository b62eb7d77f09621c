"""Packets of JSON between an agent and its forge."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

PACKET_BYTES = 1 << 20


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends. A packet arrives whole, also if a fork sends others."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    return ends


def send(end: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError, also if it is too long."""
    end.send(json.dumps(message).encode())


def receive(end: socket.socket) -> dict[str, Any]:
    """Return the next message. Raises OSError or, when the other end is closed, ValueError."""
    message: dict[str, Any] = json.loads(end.recv(PACKET_BYTES))
    return message
