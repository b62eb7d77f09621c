"""Raise the limit of open files: the usual 1,024 suffice for small jobs only."""

from __future__ import annotations

import resource

ENOUGH = 1 << 20  # a limit of 10^9, as in containers, slows down programs that close all of them


def raise_descriptor_limit(wanted: int = ENOUGH) -> int:
    """Raise the soft limit to what is wanted, as far as the hard limit allows; return it.

    Processes that are started later inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= possible:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible
