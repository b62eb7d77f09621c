"""Find out which nodes of a job give no sign of life."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from clusterrun.errors import ClusterrunError
from clusterrun.shared import shell
from clusterrun.shared.hostlist import fold_hostlist

ASK_S = 15.0
CONNECT_S = 3.0
AT_ONCE = 64
_NODE = re.compile(r"\bNodeName=(\S+)")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
_SITE_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


def unreachable(nodes: Sequence[str]) -> tuple[str, ...]:
    """Name the nodes on which Slurm's daemon takes no connection; asks slurmctld twice in all.

    Where Slurm does not say at which address and port, or nobody answers there, nothing is known.
    """
    places = _places(nodes)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(places, pool.map(_answers, places.values()), strict=True))
    if not any(answers.values()):
        return ()  # not even the node that this runs on
    return tuple(node for node in nodes if not answers.get(node, True))


def known_address(node: str) -> str:
    """Return a node's name if it resolves, else the address that Slurm has for it (NodeAddr)."""
    try:
        socket.getaddrinfo(node, None)
    except (OSError, UnicodeError):
        found = _ADDRESS.search(_shown("--oneliner", "node", node))
        return found[1] if found else node
    return node


def _places(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    if not nodes:
        return {}
    site = _SITE_PORT.search(_shown("config"))
    places = {}
    for line in _shown("--oneliner", "node", fold_hostlist(nodes)).splitlines():
        name, address, port = _NODE.search(line), _ADDRESS.search(line), _PORT.search(line) or site
        if name and address and port:
            places[name[1]] = (address[1], int(port[1]))
    return places


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, CONNECT_S).close()
    except OSError:
        return False
    return True


def _shown(*what: str) -> str:
    options = [word for word in what if word.startswith("-")]
    words = [word for word in what if not word.startswith("-")]
    try:
        return shell.run(["scontrol", *options, "show", *words], timeout_s=ASK_S).stdout
    except ClusterrunError:
        return ""
