"""Ask the running ranks of a node for their flight recorders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from clusterrun.node.forward.spool import Spool

ANSWER_S = 5.0  # a rank needs 50 ms, unless its main thread holds the GIL
_LOOK_S = 0.05


async def collect(ranks: Iterable[int], spool: Spool, within_s: float = ANSWER_S) -> list[int]:
    """Have the ranks write their dumps into the spool; return those that did in time."""
    before = {rank: _version(spool.dump(rank)) for rank in ranks}  # a rank needs only 1 ms
    waiting = {rank: old for rank, old in before.items() if _ask(spool.pipe(rank))}
    asked, deadline = sorted(waiting), time.monotonic() + within_s
    while waiting and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        waiting = {r: old for r, old in waiting.items() if _version(spool.dump(r)) == old}
    return [rank for rank in asked if rank not in waiting]


def _ask(pipe: Path) -> bool:
    """Wake the rank's thread; return False if there is none."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(descriptor, b"?") == 1
        finally:
            os.close(descriptor)
    return False


def _version(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
