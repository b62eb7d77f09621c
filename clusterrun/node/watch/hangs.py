"""Detect a training that hangs, and the rank that the others wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterrun.node.base.causes import Cause, Failure, NodeExit
from clusterrun.node.base.tasks import Tasks
from clusterrun.node.link.questions import Questions
from clusterrun.node.watch import stacks
from clusterrun.shared.joined import Unjoined
from clusterrun.shared.wording import count

STEPS_MEASURED = 50
PATIENCE = 10  # times a usual step
EXTENSIONS = 3  # of the limit, for ranks that work without a step, such as an evaluation
JOINING_S = 120.0  # importing torch, and the setup of most scripts, take less
LOOK_MOST_S = 10.0  # a longer time between looks means that the whole job was suspended


@dataclass(kw_only=True)
class Progress:
    """Watch a count that grows with the steps, and the bytes that ranks print.

    `floor_s` is the least time without either that counts as a hang; 0 switches this off. Time
    while the scheduler suspends the job does not count.
    """

    floor_s: float
    _steps: int = 0
    _printed: int = 0
    _looked_at: float | None = None
    _watched_s: float = 0.0
    _moved_at: float = 0.0
    _step_at: float = 0.0
    _extensions: int = 0
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_MEASURED))

    def look(self, now: float, *, steps: int, printed: int) -> None:
        """Record how far the ranks are; `now` in seconds of a monotonic clock."""
        if self._looked_at is not None:
            self._watched_s += min(now - self._looked_at, LOOK_MOST_S)
        self._looked_at = now
        if steps > self._steps:
            if self._steps:
                self._durations.append((self._watched_s - self._step_at) / (steps - self._steps))
            self._steps, self._step_at = steps, self._watched_s
            self._moved_at = self._watched_s
            self._extensions = 0
        if printed != self._printed:
            self._printed, self._moved_at = printed, self._watched_s

    def extend(self, is_saving: bool) -> bool:
        """Wait for the limit once more; return False after too many times without a save."""
        self._extensions += not is_saving
        self._moved_at = self._watched_s
        return is_saving or self._extensions <= EXTENSIONS

    @property
    def limit_s(self) -> float:
        """The time without progress that counts as a hang."""
        found = sorted(self._durations)
        return max(self.floor_s, PATIENCE * (found[len(found) // 2] if found else 0.0))

    @property
    def stalled_s(self) -> float:
        """The time without progress at the last look if it is above the limit, else 0.

        Before the first step only torch's own timeouts apply: a start may take any time.
        """
        if not self.floor_s or not self._steps:
            return 0.0
        idle_s = self._watched_s - self._moved_at
        return idle_s if idle_s > self.limit_s else 0.0


KEEP_S = 30.0  # for evidence of where the ranks are: a hang must end
AGAIN_S = 5.0  # between two checks of where the ranks are
LEAVERS_LOOK_S = 10.0  # between two checks of ranks that run after others have ended
SAVE_BYTES = 1 << 20  # moved between two checks: a save, an upload or an export runs
IDLE_BYTES = 1 << 10  # a waiting rank moves less: NCCL's watchdog polls rank 0's store


@dataclass(kw_only=True)
class HangWatch:
    """Watch the ranks of the first node: if any rank hangs, these also stop soon.

    `floor_s` is the least time without a step that counts as a hang; 0 switches this off. `keep`
    keeps evidence of where the ranks are, before they are ended.
    """

    floor_s: float
    node: str
    questions: Questions
    failed: Callable[[Failure], None]
    keep: Callable[[list[stacks.RankPlace]], Awaitable[None]] | None = None
    _steps_reported: int = 0
    _others_reported: int = 0
    _calls: int = 0
    _printed: int = 0
    _is_through: bool = False
    _is_leaving: bool = False
    _is_reported: bool = False
    _tasks: Tasks = field(default_factory=Tasks)

    def __post_init__(self) -> None:
        """Start measuring."""
        self._progress = Progress(floor_s=self.floor_s)

    def close(self) -> None:
        """Stop what still runs for an attempt that has ended."""
        self._tasks.cancel()

    def heard_of(self, *, calls: int, printed: int) -> None:
        """Take how often the ranks have asked whether to save, and the bytes that they printed."""
        self._calls, self._printed = calls, printed

    def heard(self, event: Mapping[str, Any]) -> None:
        """Count a rank's event; stop looking for hangs when the training has ended."""
        if event.get("type") == "step":
            self._steps_reported += 1
            self._is_through = event.get("step") == event.get("total")
        else:
            self._others_reported += 1
            self._is_through |= event.get("type") == "alive" and event.get("training") is False

    def look(self) -> None:
        """Report once if there was no progress for too long."""
        now = time.monotonic()
        if self._is_through or self._is_leaving or self._is_reported or len(self._tasks):
            return
        printed = self._printed + self._others_reported
        self._progress.look(now, steps=self._steps(), printed=printed)
        if stalled_s := self._progress.stalled_s:
            self._tasks.start(self._report(stalled_s))

    def leaving(self) -> None:
        """Once ranks have succeeded, watch for the end of the others instead of steps."""
        if not self._is_leaving and self.floor_s:
            self._tasks.start(self._watch_leavers())
        self._is_leaving = True

    async def _watch_leavers(self) -> None:
        """Find a stuck rank: it does nothing, while others may save or compute for a long time."""
        is_stuck = False
        while not is_stuck:
            progress = Progress(floor_s=self.floor_s)
            while not progress.stalled_s:
                progress.look(time.monotonic(), steps=1, printed=await self._signs())
                await asyncio.sleep(min(LEAVERS_LOOK_S, self.floor_s / 4))
            found, silent, is_moving, _ = await self._look_twice()
            is_stuck = not is_moving
        text = f"other ranks have ended; no progress for {progress.stalled_s:.0f} s"
        await self._end(text, found, silent)

    async def _signs(self) -> int:
        """Count the reads, writes and calls of the ranks that are left."""
        answers = await self.questions.ask("signs")
        given = (message.get("signs") for message in answers.given.values())
        return sum(signs for signs in given if isinstance(signs, int))

    def _steps(self) -> int:
        return self._calls + self._steps_reported

    async def _look_twice(self) -> tuple[list[stacks.RankPlace], int, bool, bool]:
        """Return where the ranks are, the silent nodes, and whether a rank moves, and saves."""
        before, _ = await stacks.everywhere(self.questions)
        signs = await self._signs()  # not before: the ranks write their stacks
        await asyncio.sleep(AGAIN_S)
        moved = await self._signs() - signs
        found, answers = await stacks.everywhere(self.questions)
        is_saving = moved > SAVE_BYTES + IDLE_BYTES * len(found)
        return found, len(answers.silent), stacks.is_moving(before, found), is_saving

    async def _report(self, stalled_s: float) -> None:
        """Report where the ranks are, unless one moves or saves: a long save is not a hang."""
        steps = self._steps()
        found, silent, is_moving, is_saving = await self._look_twice()
        is_alive = (is_moving or is_saving) and self._progress.extend(is_saving)
        if self._steps() == steps and not is_alive:  # none has ended in the meantime
            await self._end(f"no step ended for {stalled_s:.0f} s", found, silent)

    async def _end(self, text: str, found: list[stacks.RankPlace], unheard: int) -> None:
        self._is_reported = True
        if self.keep is not None:
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
                await asyncio.wait_for(self.keep(found), KEEP_S)
        suspect = stacks.suspect(found) or next(iter(found if self._is_leaving else ()), None)
        where = f": {stacks.sentence(found)}" if found else ""
        silent = f"; {count(unheard, 'node')} did not answer" if unheard else ""
        self.failed(
            Failure(
                at=time.time(),
                node=suspect.node if suspect else self.node,
                rank=suspect.rank if suspect else None,
                code=int(NodeExit.HUNG),
                cause=Cause.HALTED if suspect and suspect.is_halted else Cause.HUNG,
                message=f"{text}{where}{silent}",
                where=suspect.where.partition(" ")[0] if suspect else "",
            )
        )


async def unjoined(questions: Questions) -> Unjoined | None:
    """Ask all nodes after two minutes, once ranks run; return None if a rank has joined a group."""
    while True:
        await asyncio.sleep(JOINING_S)
        found = (await questions.ask("joins")).given.values()
        if any(each["joined"] for each in found):
            return None
        if running := sum(each["running"] for each in found):
            return Unjoined(running=running, waiting=sum(each["waiting"] for each in found))
