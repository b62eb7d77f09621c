"""Find where the ranks of a node are when no step ends: process states and Python stacks.

Their flight recorders, which they write when they are asked, tell more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from clusterrun.diagnosis.kinds import INSTALLED
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.questions import Answers, Questions
from clusterrun.rundir.request import DUMPS, answer_path, requests
from clusterrun.shared.control_page import STACKS_SIGNAL
from clusterrun.shared.files import end_of, size_of, write_whole

ANSWER_S = 2.0
DUMP_S = 5.0  # a rank needs 50 ms, unless its main thread holds the GIL
_LOOK_S = 0.05
REQUESTS_S = 1.0  # between looks for requests
_STACK_BYTES = 1 << 20
NAMED_GROUPS = 4
_STACK = "Stack (most recent call first):"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
# Where ranks wait for others: in a collective, or in the backward pass, which ends in one.
_WAITING = re.compile(
    r"distributed_c10d\.py|_engine_run_backward|/torch/distributed/|/deepspeed/comm/|store\.py"
    r"|synchronize|_cuda_synchronize"
)
_STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "blocked in the kernel, by a file system or a driver",
}
_CERTAIN = ("gone", _STATES[psutil.STATUS_STOPPED], _STATES[psutil.STATUS_TRACING_STOP])


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank is in the user's code (`train.py:120 in step`), and whether it waits for others.

    `state` is why the process does not run, "" if it runs; `stack` is a checksum of the stack.
    """

    rank: int
    node: str
    where: str
    is_waiting: bool
    state: str = ""
    stack: int = 0

    @property
    def is_halted(self) -> bool:
        """Return whether the process exists but does not run."""
        return self.state in _STATES.values()


async def places(pids: Mapping[int, int], spool: Spool, node: str) -> list[RankPlace]:
    """Ask the ranks for their stacks; return where each is after ANSWER_S."""
    before = {rank: size_of(spool.stacks(rank)) for rank in pids}
    states = {rank: _state(pid) for rank, pid in pids.items()}
    for pid in pids.values():
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
    await asyncio.sleep(ANSWER_S)
    found = []
    for rank, pid in pids.items():
        text = end_of(spool.stacks(rank), _STACK_BYTES, since=before[rank]).decode(errors="replace")
        found.append(_place(rank, node, (states[rank], _state(pid)), text))
    return found


def bytes_moved(pids: Iterable[int]) -> int:
    """Count the bytes that processes have read and written, by their calls and on the disk.

    The kernel counts a call when it returns, and a large write can take minutes.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            counters = psutil.Process(pid).io_counters()
            total += counters.read_chars + counters.write_chars
            total += counters.read_bytes + counters.write_bytes
    return total


def _state(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return _STATES.get(psutil.Process(pid).status(), "")
    return "gone"


def _place(rank: int, node: str, states: tuple[str, str], text: str) -> RankPlace:
    frames, now = main_frames(text), states[1]
    # A process that reads a file is briefly blocked in the kernel.
    state = now if now in (states[0], *_CERTAIN) else ""
    where = next((f for f in frames if not INSTALLED.search(f)), frames[0] if frames else "")
    is_waiting = any(_WAITING.search(frame) for frame in frames)
    stack = zlib.crc32("\n".join(frames).encode())
    return RankPlace(
        rank=rank, node=node, where=where, is_waiting=is_waiting, state=state, stack=stack
    )


def main_frames(text: str) -> list[str]:
    """Return the frames of the main thread, innermost first, of faulthandler's newest stack."""
    found = _FRAME.finditer(text.rpartition(_STACK)[2])
    return [f"{match['file']}:{match['line']} in {match['name']}" for match in found]


def is_moving(before: Iterable[RankPlace], now: Iterable[RankPlace]) -> bool:
    """Return whether the stack of any rank has changed."""
    stacks = {place.rank: place.stack for place in before}
    return any(stacks.get(place.rank, place.stack) != place.stack for place in now)


def suspect(found: Iterable[RankPlace]) -> RankPlace | None:
    """Return the rank that the others wait for, if one stands out."""
    given = sorted(found, key=lambda place: place.rank)
    halted = [place for place in given if place.state]
    if halted:
        return halted[0]
    busy = [place for place in given if not place.is_waiting]
    return busy[0] if 0 < len(busy) <= max(1, len(given) // 2) else None


def sentence(found: Iterable[RankPlace]) -> str:
    """Describe which ranks are where, the largest group first."""
    groups: dict[str, list[int]] = {}
    for place in found:
        where = f"at {place.where}" if place.where else "at an unknown place"
        groups.setdefault(place.state or where, []).append(place.rank)
    largest_first = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "; ".join(
        f"rank {ranks[0]} {what}"
        if len(ranks) == 1
        else f"{len(ranks)} ranks (e.g. rank {min(ranks)}) {what}"
        for what, ranks in largest_first[:NAMED_GROUPS]
    )


def to_data(found: Iterable[RankPlace]) -> dict[str, Any]:
    """Return places as a member's answer."""
    return {"places": [vars(place) for place in found]}


def from_data(message: Mapping[str, Any]) -> list[RankPlace]:
    """Read an answer."""
    return [RankPlace(**row) for row in message.get("places", ())]


async def everywhere(questions: Questions) -> tuple[list[RankPlace], Answers]:
    """Return where the ranks of all nodes are, and what the nodes answered."""
    answers = await questions.ask("stacks")
    return [*chain(*map(from_data, answers.given.values()))], answers


async def dump(ranks: Iterable[int], spool: Spool, within_s: float = DUMP_S) -> list[int]:
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


async def answer_looks(
    directory: Path, nodes: Sequence[str], questions: Questions, disk: SharedDisk
) -> None:
    """Show where the ranks are, one request after the other: `diagnose --stacks` makes them.

    A request is an empty file in the attempt's directory (rundir/request.py), the answer another.
    """
    seen: set[Path] = set()
    while True:
        found: list[Path] = []
        with contextlib.suppress(OSError):  # a listing shows new files at once, also on NFS
            found = await disk.do(partial(requests, directory))
        for path in sorted({*found} - seen):
            seen.add(path)
            data = json.dumps(await _looked(nodes, questions, is_dumped=path.suffix == DUMPS))
            with contextlib.suppress(OSError):
                await disk.do(partial(write_whole, answer_path(path), data))
        await asyncio.sleep(REQUESTS_S)


async def _looked(nodes: Sequence[str], questions: Questions, *, is_dumped: bool) -> dict[str, Any]:
    places, answers = await everywhere(questions)
    heard, dumped = {*answers.given}, list[int]()
    if is_dumped:
        dumps = await questions.ask("dump", live=True, within_s=2 * DUMP_S)
        given = (message.get("dumped", ()) for message in dumps.given.values())
        heard, dumped = heard & {*dumps.given}, sorted(chain(*given))
    silent = [name for number, name in enumerate(nodes) if number not in heard]
    return {**to_data(places), "dumped": dumped, "silent": silent}
