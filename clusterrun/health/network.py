"""This machine's name, ports and interfaces."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from clusterrun.health.check import Check, fail, note, ok

INTERFACES: Final = Path("/sys/class/net")
TRIED: Final = 32  # ports, spread over the range
_IFF_UP: Final = 1
_IFF_LOOPBACK: Final = 8


def own_name() -> Check:
    """Resolve the name of this machine, and its address back to a name."""
    name, host = "net.name", socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        text = f"the name of this machine, {host}, does not resolve: {error.strerror}"
        return note(name, text, f"add it to /etc/hosts: 127.0.1.1 {host}")
    try:
        back = socket.gethostbyaddr(str(address))[0]
    except OSError:
        text = f"{host} is {address}, which resolves to no name"
        return note(name, text, f"add it to /etc/hosts: {address} {host}")
    return ok(name, f"{host} is {address}, and that is {back}")


def free_ports(first: int, last: int) -> Check:
    """Try to listen on ports of the range that jobs use."""
    tried = range(first, last + 1, max(1, (last + 1 - first) // TRIED))[:TRIED]
    free = sum(map(_is_free, tried))
    text = f"{free} of {len(tried)} ports tried in {first}-{last} are free"
    if free:
        return ok("net.ports", text)
    return fail("net.ports", text, "choose another range, e.g. --port-range 40000-49999")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def interface() -> Check:
    """Look for an interface other than loopback that is up."""
    name, found = "net.interface", sorted(filter(_is_up, _interfaces()))
    if found:
        return ok(name, f"up: {', '.join(found)}")
    return note(name, "no interface but loopback is up", "list the interfaces: ip -brief link")


def _interfaces() -> list[str]:
    try:
        return os.listdir(INTERFACES)
    except OSError:
        return [name for _, name in socket.if_nameindex()]


def _is_up(name: str) -> bool:
    try:
        flags = int((INTERFACES / name / "flags").read_text(), 16)
    except (OSError, ValueError):
        return False
    return bool(flags & _IFF_UP) and not flags & _IFF_LOOPBACK
