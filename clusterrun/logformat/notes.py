"""Lines in which an agent records what its node knows about a failure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_MEMORY: Final = re.compile(
    r"cgroup: oom_kill \+(\d{1,9}), limit (\d{1,20}|unknown), peak (\d{1,20}|unknown)$"
)


class Memory(NamedTuple):
    """What a node's memory cgroup counted: OOM kills; its limit and peak in bytes, if known."""

    kills: int
    limit: int | None = None
    peak: int | None = None


def memory_line(found: Memory) -> str:
    """Return the line that records what the cgroup counted."""
    shown = (f"{'unknown' if size is None else size}" for size in found[1:])
    return "cgroup: oom_kill +{}, limit {}, peak {}".format(found.kills, *shown)


def read_memory(line: str) -> Memory | None:
    """Return what a line records; None if it is another line.

    >>> read_memory(memory_line(Memory(2, 4096)))
    Memory(kills=2, limit=4096, peak=None)
    """
    found = _MEMORY.match(line)
    if found is None:
        return None
    limit, peak = (None if text == "unknown" else int(text) for text in found.groups()[1:])
    return Memory(int(found[1]), limit, peak)
