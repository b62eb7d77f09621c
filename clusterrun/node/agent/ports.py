"""Ports that differ between jobs which share a node."""

from __future__ import annotations

import errno
import socket
import zlib
from typing import NamedTuple

CANDIDATES = 16  # for each of the two purposes
_STRIDE = 797  # prime, so that the candidates of neighbouring jobs do not run in step


class Ports(NamedTuple):
    """The ports to try for the agents' link and for torch's rendezvous; none is in both."""

    link: tuple[int, ...]
    rendezvous: tuple[int, ...]


def candidate_ports(job: str, attempt: int, within: tuple[int, int]) -> Ports:
    """Derive the ports to try from job and attempt; `within` are the first and the last allowed.

    `job` tells the job from all others that may share the node: its id and its run directory,
    since the ids of this machine's own jobs are counted by each directory of runs.
    """
    first, last = within
    size = last - first + 1
    stride = _STRIDE if size % _STRIDE else 1
    start = zlib.crc32(f"{job}:{attempt}".encode())
    numbers = range(min(size, 2 * CANDIDATES))
    ports = tuple(first + (start + number * stride) % size for number in numbers)
    return Ports(link=ports[0::2], rendezvous=ports[1::2])


def listening_socket(port: int, host: str = "") -> socket.socket:
    """Listen on a port, on all interfaces where no host is given; raises OSError if it is taken."""
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            # IPv6 may be switched off in the kernel although the library has it. A port that is
            # taken on IPv6 alone is somebody's who would get what is meant for us.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


def free_port(ports: tuple[int, ...]) -> int:
    """Find the first port on which this host can listen now; raises OSError if none is free."""
    last: OSError = OSError("no port to try")
    for port in ports:
        try:
            listening_socket(port).close()
        except OSError as error:
            last = error
        else:
            return port
    raise last
