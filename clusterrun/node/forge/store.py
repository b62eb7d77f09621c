"""Host the ranks' store, as torch's launcher does on the first node: `store ADDRESS PORT …`.

It is the store of torch's static rendezvous, but waits for nobody: no launcher joins it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from clusterrun.node.base.processes import die_with_parent
from clusterrun.node.forge.ranks import leave_to_agent


def host(
    address: str, port: int, nodes: int, timeout_s: int, is_there: Callable[[], None]
) -> NoReturn:
    """Host the store until this process is killed."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    waits_s = timedelta(seconds=timeout_s)
    store = TCPStore(address, port, nodes, True, waits_s, wait_for_workers=False, multi_tenant=True)
    is_there()
    while store:
        signal.pause()
    os._exit(0)


def main(argv: Sequence[str]) -> None:
    """Host the store for the agent that starts this process."""
    die_with_parent(int(argv[0]))
    leave_to_agent()
    host(argv[1], int(argv[2]), int(argv[3]), int(argv[4]), lambda: None)


if __name__ == "__main__":
    main(sys.argv[1:])
