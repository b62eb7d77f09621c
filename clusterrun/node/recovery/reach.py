"""Find the nodes of a job that can't be reached."""

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
    """Return the nodes on which slurmd accepts no connection; ask slurmctld twice in all.

    Leave out nodes without a known address and port. Return none if no node answers.
    """
    places = _places(nodes)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(places, pool.map(_answers, places.values()), strict=True))
    if not any(answers.values()):
        return ()  # not even this node
    return tuple(node for node in nodes if not answers.get(node, True))


def known_address(node: str) -> str:
    """Return a node's name if it resolves, else its address in Slurm (NodeAddr)."""
    try:
        socket.getaddrinfo(node, None)
    except (OSError, UnicodeError):
        found = _ADDRESS.search(_scontrol("--oneliner", "show", "node", node))
        return found[1] if found else node
    return node


def _places(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    if not nodes:
        return {}
    site = _SITE_PORT.search(_scontrol("show", "config"))
    places = {}
    for line in _scontrol("--oneliner", "show", "node", fold_hostlist(nodes)).splitlines():
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


def _scontrol(*words: str) -> str:
    try:
        return shell.run(["scontrol", *words], timeout_s=ASK_S).stdout
    except ClusterrunError:
        return ""
