"""Lines in which an agent records what its node knows about a failure."""

from __future__ import annotations

import re
from typing import Final

_KILLS: Final = re.compile(r"cgroup: oom_kill \+(\d{1,9}), limit ")


def memory_line(kills: int, limit: int | None, peak: int | None) -> str:
    """Return the line that records how often the OOM killer killed, and two sizes in bytes."""
    shown = (f"{'unknown' if size is None else size}" for size in (limit, peak))
    return "cgroup: oom_kill +{}, limit {}, peak {}".format(kills, *shown)


def oom_kills(line: str) -> int | None:
    """Return the kills that a line records; None if it is another line.

    >>> oom_kills(memory_line(2, 4096, None))
    2
    """
    found = _KILLS.match(line)
    return int(found[1]) if found else None
