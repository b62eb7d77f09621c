"""Detect a training that hangs, and the rank that the others wait for.

It is found by where the ranks are when no step ends: process states and Python stacks. Their
flight recorders, which they write when they are asked, tell more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from clusterrun.diagnosis.kinds import INSTALLED
from clusterrun.node.base.causes import Cause, Failure, NodeExit
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.forward.spool import Spool
from clusterrun.rundir.end import answer_path, requests
from clusterrun.shared.control_page import STACKS_SIGNAL
from clusterrun.shared.files import end_of, size_of, write_whole
from clusterrun.shared.wording import count

if TYPE_CHECKING:  # agents need neither
    from clusterrun.node.link.head import Answers, Questions

STEPS_MEASURED = 50
PATIENCE = 10  # times a usual step
EXTENSIONS = 3  # of the limit, for ranks that work without a step, such as an evaluation
LOOK_MOST_S = 10.0  # a longer time between looks means that the whole job was suspended
KEEP_S = 30.0  # for evidence of where the ranks are: a hang must end
AGAIN_S = 5.0  # between two checks of where the ranks are
LEAVERS_LOOK_S = 10.0  # between two checks of ranks that run after others have ended
SAVE_BYTES = 1 << 20  # moved between two checks: a save, an upload or an export runs
IDLE_BYTES = 1 << 10  # a waiting rank moves less: NCCL's watchdog polls rank 0's store
ANSWER_S = 2.0
DUMP_S = 5.0  # a rank needs 50 ms, unless its main thread holds the GIL
_LOOK_S = 0.05
REQUESTS_S = 1.0  # between looks for requests
_STACK_BYTES = 1 << 20
NAMED_GROUPS = 4
_STACK = "Stack (most recent call first):"
_FRAME = r'(?m)^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$'
# Where ranks wait for others: in a collective, or in the backward pass, which ends in one.
_WAITING = (
    r"distributed_c10d\.py|_engine_run_backward|/torch/distributed/|/deepspeed/comm/|store\.py"
    r"|synchronize|_cuda_synchronize"
)
_HALTED = {  # the states in which a process does not run
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "blocked in the kernel, by a file system or a driver",
}
_CERTAIN = ("gone", _HALTED[psutil.STATUS_STOPPED], _HALTED[psutil.STATUS_TRACING_STOP])


class RankPlace(NamedTuple):
    """Where a rank is in the user's code, and whether it waits for others."""

    rank: int
    node: str
    where: str  # as `train.py:120 in step`
    is_waiting: bool
    state: str = ""  # why the process does not run, "" if it runs
    stack: int = 0  # a checksum


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
    """Count the bytes that processes move, by calls (counted when they return) and on the disk."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            counters = psutil.Process(pid).io_counters()
            total += counters.read_chars + counters.write_chars
            total += counters.read_bytes + counters.write_bytes
    return total


def _state(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return _HALTED.get(psutil.Process(pid).status(), "")
    return "gone"


def _place(rank: int, node: str, states: tuple[str, str], text: str) -> RankPlace:
    """Return where a rank is, by its state before and after it wrote its stacks (`text`)."""
    newest = text.rpartition(_STACK)[2]  # of faulthandler: the main thread, innermost first
    frames = [f"{f['file']}:{f['line']} in {f['name']}" for f in re.finditer(_FRAME, newest)]
    before, now = states
    # A process that reads a file is briefly blocked in the kernel: this state counts if it lasts.
    state = now if now == before or now in _CERTAIN else ""
    own_frames = [frame for frame in frames if not INSTALLED.search(frame)]  # the user's code
    where = (own_frames or frames or [""])[0]
    is_waiting = any(re.search(_WAITING, frame) for frame in frames)
    stack = zlib.crc32("\n".join(frames).encode())
    return RankPlace(rank, node, where, is_waiting, state, stack)


def suspect(found: Iterable[RankPlace]) -> RankPlace | None:
    """Return the rank that the others wait for, if one stands out."""
    places = sorted(found, key=lambda place: place.rank)
    if halted := [place for place in places if place.state]:
        return halted[0]
    busy = [place for place in places if not place.is_waiting]
    return busy[0] if 0 < len(busy) <= max(1, len(places) // 2) else None  # most: none stands out


def sentence(found: Iterable[RankPlace]) -> str:
    """Describe which ranks are where, the largest group first."""
    groups: dict[str, list[int]] = {}
    for place in found:
        where = f"at {place.where}" if place.where else "at an unknown place"
        groups.setdefault(place.state or where, []).append(place.rank)
    texts = []
    for what, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))[:NAMED_GROUPS]:
        some = f"{len(ranks)} ranks (e.g. rank {min(ranks)})"
        who = some if len(ranks) > 1 else f"rank {ranks[0]}"
        texts.append(f"{who} {what}")
    return "; ".join(texts)


def to_data(found: Iterable[RankPlace]) -> dict[str, Any]:
    """Return places as a member's answer."""
    return {"places": [place._asdict() for place in found]}


def from_data(message: Mapping[str, Any]) -> list[RankPlace]:
    """Read an answer."""
    return [RankPlace(**row) for row in message.get("places", ())]


async def everywhere(questions: Questions) -> tuple[list[RankPlace], Answers]:
    """Return where the ranks of all nodes are, and what the nodes answered."""
    answers = await questions.ask("stacks")
    return [*chain(*map(from_data, answers.given.values()))], answers


async def dump(ranks: Iterable[int], spool: Spool, within_s: float = DUMP_S) -> list[int]:
    """Have the ranks write their dumps into the spool; return those that did in time."""
    before = {rank: _version(spool.dump(rank)) for rank in ranks}  # a rank may answer at once
    unanswered = {rank: old for rank, old in before.items() if _request_dump(spool.pipe(rank))}
    asked, deadline = sorted(unanswered), time.monotonic() + within_s
    while unanswered and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        unanswered = {r: old for r, old in unanswered.items() if _version(spool.dump(r)) == old}
    return [rank for rank in asked if rank not in unanswered]


def _request_dump(pipe: Path) -> bool:
    """Wake the rank's thread that writes dumps; return False if there is none."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(descriptor, b"?") == 1
        finally:
            os.close(descriptor)
    return False


def _version(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return 0, 0


async def answer_looks(
    directory: Path, nodes: Sequence[str], questions: Questions, disk: SharedDisk
) -> None:
    """Answer the requests of `diagnose --stacks` (rundir/outcome.py), one after the other."""
    answered: set[Path] = set()
    while True:
        found: list[Path] = []
        with contextlib.suppress(OSError):  # a listing shows new files at once, also on NFS
            found = await disk.do(partial(requests, directory))
        for path in sorted({*found} - answered):
            answered.add(path)
            data = json.dumps(await _stacks_and_dumps(nodes, questions))
            with contextlib.suppress(OSError):
                await disk.do(partial(write_whole, answer_path(path), data))
        await asyncio.sleep(REQUESTS_S)


async def _stacks_and_dumps(nodes: Sequence[str], questions: Questions) -> dict[str, Any]:
    """Return where all ranks are, which have written dumps, and the nodes that did not answer."""
    places, answers = await everywhere(questions)
    dumps = await questions.ask("dump", live=True, within_s=2 * DUMP_S)  # live: agents pack them
    dumped = sorted(chain(*(message.get("dumped", ()) for message in dumps.given.values())))
    heard = {*answers.given} & {*dumps.given}
    silent = [name for node_rank, name in enumerate(nodes) if node_rank not in heard]
    return {**to_data(places), "dumped": dumped, "silent": silent}


class Progress:
    """Watch a count that grows with the steps, and the bytes that ranks print."""

    def __init__(self, floor_s: float) -> None:
        self.floor_s = floor_s  # the least time without either that counts as a hang; 0: none does
        self._steps = self._printed = self._extensions = 0
        # In seconds of watching: without the time in which the job was suspended.
        self._watched_s = self._moved_at = self._step_at = 0.0
        self._looked_at: float | None = None
        self._durations = deque[float](maxlen=STEPS_MEASURED)

    def record(self, now: float, *, steps: int, printed: int) -> None:
        """Record how far the ranks are; `now` in seconds of a monotonic clock."""
        if self._looked_at is not None:
            self._watched_s += min(now - self._looked_at, LOOK_MOST_S)
        self._looked_at = now
        if steps > self._steps:
            if self._steps:  # not the first: its time includes the start
                self._durations.append((self._watched_s - self._step_at) / (steps - self._steps))
            self._steps, self._step_at = steps, self._watched_s
            self._moved_at = self._watched_s
            self._extensions = 0
        if printed != self._printed:
            self._printed, self._moved_at = printed, self._watched_s

    def extend(self, is_saving: bool) -> bool:
        """Wait for the limit again; return False if it was extended too often without a save."""
        if not is_saving:
            self._extensions += 1
        self._moved_at = self._watched_s
        return is_saving or self._extensions <= EXTENSIONS

    @property
    def limit_s(self) -> float:
        """The time without progress that counts as a hang."""
        found = sorted(self._durations)
        return max(self.floor_s, PATIENCE * (found[len(found) // 2] if found else 0.0))

    @property
    def stalled_s(self) -> float:
        """The time without progress, as last recorded, if it is above the limit; else 0.

        Before the first step only torch's own timeouts apply: a start may take any time.
        """
        if not self.floor_s or not self._steps:
            return 0.0
        idle_s = self._watched_s - self._moved_at
        return idle_s if idle_s > self.limit_s else 0.0


@dataclass(kw_only=True)
class HangWatch:
    """Watch the ranks of the first node: if any rank hangs, these also stop soon."""

    floor_s: float  # the least time without a step that counts as a hang; 0 switches this off
    node: str
    questions: Questions
    failed: Callable[[Failure], None]
    tasks: Tasks  # those of the attempt
    keep: Callable[[list[RankPlace]], Awaitable[None]] | None = None  # evidence before the end
    _steps_reported: int = 0
    _others_reported: int = 0
    _calls: int = 0
    _printed: int = 0
    _is_through: bool = False
    _is_leaving: bool = False
    _is_reported: bool = False
    _looking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        """Start measuring."""
        self._progress = Progress(self.floor_s)

    def heard_of(self, *, calls: int, printed: int) -> None:
        """Take how often the ranks have asked whether to save, and the bytes that they printed."""
        self._calls, self._printed = calls, printed

    def heard(self, event: Mapping[str, Any]) -> None:
        """Count a rank's event; look for no hangs once the last step, or a Trainer, has ended."""
        if event.get("type") == "step":
            self._steps_reported += 1
            self._is_through = event.get("step") == event.get("total")
        else:
            self._others_reported += 1
            self._is_through |= event.get("type") == "alive" and event.get("training") is False

    def check(self) -> None:
        """Report once if there was no progress for too long."""
        is_looking = self._looking is not None and not self._looking.done()
        if self._is_through or self._is_leaving or self._is_reported or is_looking:
            return
        printed = self._printed + self._others_reported  # a sign of life if it grows
        self._progress.record(time.monotonic(), steps=self._steps(), printed=printed)
        if stalled_s := self._progress.stalled_s:
            self._looking = self.tasks.start(self._report_unless_alive(stalled_s))

    def watch_leavers(self) -> None:
        """Once ranks have succeeded, watch for the end of the others instead of steps."""
        if not self._is_leaving and self.floor_s:
            self.tasks.start(self._await_leavers())
        self._is_leaving = True

    async def _await_leavers(self) -> None:
        """Report a rank that does nothing; others may save or compute for a long time."""
        is_stuck = False
        while not is_stuck:
            progress = Progress(self.floor_s)
            while not progress.stalled_s:  # `steps` stays 1: what the ranks do counts as printed
                progress.record(time.monotonic(), steps=1, printed=await self._activity())
                await asyncio.sleep(min(LEAVERS_LOOK_S, self.floor_s / 4))
            found, silent, is_moving, _ = await self._look_twice()
            is_stuck = not is_moving
        text = f"other ranks have ended; no progress for {progress.stalled_s:.0f} s"
        await self._report_hang(text, found, silent)

    async def _activity(self) -> int:
        """Return a count that grows as ranks read, write, and call should_checkpoint()."""
        answers = await self.questions.ask("signs")
        given = (message.get("signs") for message in answers.given.values())
        return sum(signs for signs in given if isinstance(signs, int))

    def _steps(self) -> int:
        return self._calls + self._steps_reported

    async def _look_twice(self) -> tuple[list[RankPlace], int, bool, bool]:
        """Return where ranks are, how many nodes are silent, if a rank moves, and if one saves."""
        before, _ = await everywhere(self.questions)
        activity = await self._activity()  # only now: writing the stacks would also count
        await asyncio.sleep(AGAIN_S)
        moved_bytes = await self._activity() - activity
        found, answers = await everywhere(self.questions)
        is_saving = moved_bytes > SAVE_BYTES + IDLE_BYTES * len(found)
        stacks = {place.rank: place.stack for place in before}
        is_moving = any(stacks.get(place.rank, place.stack) != place.stack for place in found)
        return found, len(answers.silent), is_moving, is_saving

    async def _report_unless_alive(self, stalled_s: float) -> None:
        """Report where the ranks are, unless one moves or saves: a long save is not a hang."""
        steps = self._steps()
        found, silent, is_moving, is_saving = await self._look_twice()
        is_alive = (is_moving or is_saving) and self._progress.extend(is_saving)
        if self._steps() == steps and not is_alive:  # no step ended meanwhile
            await self._report_hang(f"no step ended for {stalled_s:.0f} s", found, silent)

    async def _report_hang(self, text: str, found: list[RankPlace], silent_nodes: int) -> None:
        """Report the hang as the failure of the rank that stands out, once the evidence is kept."""
        self._is_reported = True
        if self.keep is not None:
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
                await asyncio.wait_for(self.keep(found), KEEP_S)
        blamed = suspect(found)
        if self._is_leaving and found:  # others have ended: each rank that is left is to blame
            blamed = blamed or found[0]
        where = f": {sentence(found)}" if found else ""
        silent = f"; {count(silent_nodes, 'node')} did not answer" if silent_nodes else ""
        failure = Failure(
            node=blamed.node if blamed else self.node,
            rank=blamed.rank if blamed else None,
            code=int(NodeExit.HUNG),
            cause=Cause.HALTED if blamed and blamed.state in _HALTED.values() else Cause.HUNG,
            message=f"{text}{where}{silent}",
            where=blamed.where.partition(" ")[0] if blamed else "",
        )
        self.failed(failure)
