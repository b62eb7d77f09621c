"""Lines in which an agent records what its node knows about a failure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KERNEL, NVML = "kernel", "nvml"  # sources of notes
_MEMORY: Final = re.compile(
    r"cgroup: oom_kill \+(\d{1,9}), limit (\d{1,20}|unknown), peak (\d{1,20}|unknown)$"
)
_CHANGED: Final = re.compile(
    r"preflight: ([a-z_]+\.[a-z_]+): (ok|note) at the start; now (note|skip|fail): (.+)"
)
_NOTE: Final = re.compile(rf"({KERNEL}|{NVML}): (.+)")
_HELD: Final = re.compile(r"GPU (\d{1,4}) \(.{1,80}\): \d+ of \d+ MiB were in use before the ranks")


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


class ChangedCheck(NamedTuple):
    """A check that found less before the ranks started than after the failure."""

    id: str
    before: str
    now: str
    text: str


def changed_line(found: ChangedCheck) -> str:
    """Return the line that records how the result of a check changed."""
    return f"preflight: {found.id}: {found.before} at the start; now {found.now}: {found.text}"


def read_changed(line: str) -> ChangedCheck | None:
    """Return what a line records; None if it is another line.

    >>> read_changed(changed_line(ChangedCheck("node.tmp", "ok", "fail", "only 0 MiB are free")))
    ChangedCheck(id='node.tmp', before='ok', now='fail', text='only 0 MiB are free')
    """
    found = _CHANGED.fullmatch(line)
    return ChangedCheck(*found.groups()) if found else None


def note_line(source: str, text: str, rank: int | None = None) -> str:
    """Return the line that records what a source on the node reports, about a rank or none."""
    return f"{source}: {'' if rank is None else f'[rank{rank}]: '}{text}"


def read_note(line: str) -> tuple[str, str] | None:
    """Return the source and the text of a note; None if it is another line.

    >>> read_note(note_line(KERNEL, "python[42]: segfault at 0", 3))
    ('kernel', '[rank3]: python[42]: segfault at 0')
    """
    found = _NOTE.match(line)
    return (found[1], found[2]) if found else None


def held_text(gpu: int, address: str, used: int, total: int) -> str:
    """Describe a GPU's memory, in MiB, that was in use before the ranks started."""
    return f"GPU {gpu} ({address}): {used} of {total} MiB were in use before the ranks started"


def held_gpu(text: str) -> int | None:
    """Return the GPU whose memory was in use, by the ranks' number; None for another text.

    >>> held_gpu(held_text(3, "0000:3b:00", 70000, 81559))
    3
    """
    found = _HELD.match(text)
    return int(found[1]) if found else None
