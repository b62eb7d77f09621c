"""Find out which nodes of a job give no sign of life."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from clusterrun import shell
from clusterrun.errors import ClusterrunError
from clusterrun.hostlist import fold_hostlist

ASK_S = 15.0
CONNECT_S = 3.0
AT_ONCE = 64
SLURMD_PORT = 6818  # Slurm's own; a site or a node may have another
_NODE = re.compile(r"\bNodeName=(\S+)")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
_SITE_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


def unreachable(nodes: Sequence[str]) -> tuple[str, ...]:
    """Name the nodes on which Slurm's daemon takes no connection; asks slurmctld twice in all."""
    if not nodes:
        return ()
    site = _SITE_PORT.search(_shown("config"))
    port = int(site[1]) if site else SLURMD_PORT
    places = {node: (node, port) for node in nodes}
    for line in _shown("--oneliner", "node", fold_hostlist(nodes)).splitlines():
        name, address, own = _NODE.search(line), _ADDRESS.search(line), _PORT.search(line)
        if name and name[1] in places:
            where = address[1] if address else name[1]
            places[name[1]] = (where, int(own[1]) if own else port)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(places, pool.map(_answers, places.values()), strict=True))
    return tuple(node for node in nodes if not answers[node])


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
    except ClusterrunError:  # the connections will tell
        return ""
