"""Choose ports that differ between jobs on one node; find addresses and their interfaces."""

from __future__ import annotations

import errno
import socket
import zlib

CANDIDATES = 16
_STRIDE = 797  # prime, so that the candidates of neighbouring jobs differ


def candidate_ports(job: str, attempt: int, within: tuple[int, int]) -> tuple[int, ...]:
    """Derive the ports to try from job and attempt; `within` is the range, inclusive.

    `job` is the id and the run, since local ids are unique only in one runs directory. Attempt 0
    stands for the agents' link, the others for torch's rendezvous.
    """
    first, last = within
    size = last - first + 1
    stride = _STRIDE if size % _STRIDE else 1  # a divisor of `size` would repeat ports
    start = zlib.crc32(f"{job}:{attempt}".encode())
    numbers = range(min(size, CANDIDATES))
    return tuple(first + (start + number * stride) % size for number in numbers)


def listening_socket(port: int, host: str = "") -> socket.socket:
    """Listen on a port, on all interfaces if no host is given. Raises OSError if it is taken."""
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            # The kernel may have IPv6 disabled. But a port that is taken only on IPv6 belongs to
            # another program, which would get our connections.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


def free_port(ports: tuple[int, ...]) -> int:
    """Return the first port that is free now. Raises OSError if none is."""
    last_error = OSError("no port to try")
    for port in ports:
        try:
            listening_socket(port).close()
            return port
        except OSError as error:
            last_error = error
    raise last_error


def why_closed(address: str, port: int, within_s: float) -> str:
    """Return why a port of another machine can't be reached; "" if it can."""
    try:
        socket.create_connection((address, port), within_s).close()
    except OSError as error:
        return error.strerror or str(error) or "no answer"
    return ""


def own_addresses() -> list[str]:
    """Return this machine's IP addresses, except loopback and IPv6 link-local ones."""
    import psutil

    found = [item for items in psutil.net_if_addrs().values() for item in items]
    of_ip = [item.address for item in found if item.family in (socket.AF_INET, socket.AF_INET6)]
    return [address for address in of_ip if not address.startswith(("127.", "::1", "fe80:"))]


def interface_of(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%", 1)[0] == address for known in addresses):
            return name
    return ""
