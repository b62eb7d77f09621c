"""Ports that differ between jobs which share a node, below Linux's ephemeral range."""

from __future__ import annotations

import socket
import zlib

FIRST, LAST = 20000, 32767  # Linux hands out 32768-60999 by itself
CANDIDATES = 16
_STRIDE = 797  # prime, so that the candidates of neighbouring jobs do not run in step


def candidate_ports(job: str, attempt: int, purpose: str) -> tuple[int, ...]:
    """Derive the ports to try from job and attempt; `purpose` separates the link from torch's.

    `job` tells the job from all others that may share the node: its id and its run directory,
    since the ids of this machine's own jobs are counted by each directory of runs.
    """
    size = LAST - FIRST + 1
    start = zlib.crc32(f"{purpose}:{job}:{attempt}".encode())
    return tuple(FIRST + (start + number * _STRIDE) % size for number in range(CANDIDATES))


def listening_socket(port: int, host: str = "") -> socket.socket:
    """Listen on a port, on all interfaces where no host is given; raises OSError if it is taken."""
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError:
            pass  # IPv6 may be switched off in the kernel although the library has it
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
