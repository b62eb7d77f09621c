"""The limit of open files: the usual 1,024 are enough only for small jobs."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 1 << 20  # a limit of 10^9, as in containers, slows programs that close all descriptors
SPARE = 256  # recommended for all other files of a process


def needed_descriptors(nodes: int, ranks: int) -> int:
    """Return what one process opens: the conductor for each node, rank 0 for each rank.

    >>> needed_descriptors(2, 16)
    20
    """
    return 2 * nodes + ranks


def raise_descriptor_limit(wanted: int = ENOUGH) -> int:
    """Raise the soft limit to `wanted`, or to the hard limit if that is lower; return it.

    Processes started later inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= possible:
        return wanted if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):  # macOS has another limit beside these
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        return possible
    return soft
