"""Rest between two attempts: the agents of a step wait for the number of the next attempt.

The conductor decides meanwhile. It and the head are on one machine, so that each sees at once what
the other writes. Nothing of an attempt is left while its agents rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from clusterrun.errors import ClusterrunError
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link.head import Head
from clusterrun.rundir.claims import pass_on, passed_on
from clusterrun.shared import files
from clusterrun.shared.hostlist import parse_hostlist

WORD_S = 60.0  # for the conductor to decide: a silent scheduler or a full disk delays it
LOOK_S = 0.02


async def lead(head: Head, attempt: Attempt, disk: SharedDisk, is_over: Callable[[], bool]) -> int:
    """Have all agents rest; return the number of the next attempt, 0 if they leave."""
    pid = conductor(attempt, os.environ)
    if not pid or not await head.all_rest():
        return 0
    following = 0
    with contextlib.suppress(OSError):
        await disk.do(partial(files.create, attempt.paths.rests(attempt.number)))
        os.kill(pid, signal.SIGURG)
        following = await _word(head, attempt, disk, is_over)
    if not head.is_whole or is_over():
        return 0  # a conductor that passed the attempt on starts it in another step
    if following:
        head.send_again(following)
    return following


async def _word(head: Head, attempt: Attempt, disk: SharedDisk, is_over: Callable[[], bool]) -> int:
    """Wait for what the conductor decides; if it takes too long, leave. Raises OSError."""
    until = time.monotonic() + WORD_S
    while time.monotonic() < until and head.is_whole and not is_over():
        found = await disk.do(partial(passed_on, attempt.paths, attempt.number))
        if found is not None:
            return found
        await asyncio.sleep(LOOK_S)
    return await disk.do(partial(pass_on, attempt.paths, attempt.number, 0))


def conductor(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Return the conductor's pid if it is on this machine, else 0.

    If the job's first node is left out, or in a container, another process may have this number.
    """
    pid, who = env.get("CLUSTERRUN_BATCH_PID", ""), attempt.who
    with contextlib.suppress(OSError, ClusterrunError):
        nodes = [who.node] if who.is_local else parse_hostlist(env.get("SLURM_JOB_NODELIST", ""))
        words = os.fsdecode(Path("/proc", pid, "cmdline").read_bytes()).split("\0")
        is_beside = nodes[0] == who.node and attempt.paths.root in map(Path, words)
        return int(pid) if pid.isdigit() and is_beside else 0
    return 0
