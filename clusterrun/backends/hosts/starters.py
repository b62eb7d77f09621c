"""The commands that start a shell on each host of a job."""

from __future__ import annotations

import socket

from clusterrun.backends.hosts import openssh, start
from clusterrun.launch.plan import Plan
from clusterrun.shared.host_specs import parse_host

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def host_command(plan: Plan, rank: int) -> list[str]:
    """Return the command that starts a shell on a host; on the first one, where this runs."""
    is_here = rank == 0 or plan.hosts[rank] in LOOPBACK
    return list(start.READ) if is_here else openssh.ssh(plan.hosts[rank], start.READ)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine, for this user: its name has an address of ours."""
    spec = parse_host(host)
    if spec.user or spec.port:
        return False
    if spec.host in (*LOOPBACK, socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(spec.host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(map(_is_own, found))


def _is_own(found: tuple[socket.AddressFamily, object, object, object, object]) -> bool:
    family, *_, address = found
    try:
        with socket.socket(family) as probe:
            probe.bind(address)  # type: ignore[arg-type]  # port 0
    except OSError:
        return False
    return True
