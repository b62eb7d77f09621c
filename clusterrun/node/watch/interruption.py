"""Handle interruptions from outside, as the head: have the ranks save and exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clusterrun.node.base.causes import Cause, Ending, NodeExit
from clusterrun.node.base.shared_disk import SharedDisk
from clusterrun.node.base.tasks import Tasks
from clusterrun.node.link.head import Head
from clusterrun.node.recovery.conclude import time_left_s, warning_reason
from clusterrun.node.watch.saving import Page, Saving
from clusterrun.rundir.request import Reason, read_request, write_request

LOOK_S = 0.05
WORD_S = 0.5  # how long the conductor may take to request an end when Slurm sends SIGTERM
REQUEST_S = 5.0  # how long the disk may take to show which request was first
LEAVE_S = 60.0  # how long ranks may keep running after a save
LAST_S = 30.0  # of a long warning, to end the ranks and the job; a fifth of a short one
TRIES = 3  # attempts to have all ranks save if nodes do not answer


@dataclass(kw_only=True)
class Interruption:
    """Turn signals and requests into a save that all ranks make at one step.

    `cancel` ends the attempt without one. Slurm warns `warning_s` before the time limit.
    `has_saved` returns whether there is a checkpoint to continue from, `is_through` whether the
    last step is done. `reason` is None until the ranks must exit.
    """

    request: Path
    page: Page
    leader: Head
    warning_s: float
    happened: Callable[..., None]
    say: Callable[[str], None]
    cancel: Callable[[], None]
    has_saved: Callable[[], bool]
    is_through: Callable[[], bool]
    disk: SharedDisk
    reason: Reason | None = None
    _is_ending: bool = False
    _is_unheard: bool = False
    _tasks: Tasks = field(default_factory=Tasks)

    def __post_init__(self) -> None:
        """Handle what the link reports: signals, and the end of the ranks."""
        self._saving = Saving(self.page, self.leader.questions)
        self._requested = partial(read_request, self.request)
        self.leader.interrupted = self.ending
        self.leader.decision.completion = self._completion

    def warned(self) -> None:
        """Handle a request, or without one the time limit or a person's signal."""
        left_s = time_left_s(os.environ, time.time()) or 0.0
        self._tasks.start(self._request(warning_reason(left_s, self.warning_s)))

    def ending(self) -> None:
        """Handle SIGTERM: a preemption, unless the conductor requests an end."""
        if not self.page.is_used:
            self.cancel()
        elif not self._is_ending:  # all nodes get SIGTERM, and report it
            self._is_ending = True
            self._tasks.start(self._end_or_leave())

    async def look(self) -> None:
        """Handle a request, even without a signal. Record when the first rank can be asked."""
        if self._is_unheard and self.reason and self.page.is_used:
            self._is_unheard = False
            self.happened("interrupted", reason=self.reason.value, heard=True)
        if reason := await self.disk.do(self._requested):
            self._interrupt(reason)

    def _interrupt(self, reason: Reason) -> None:
        if reason is Reason.END and self.reason is Reason.TIME_LIMIT:
            why, code = f"{self.reason.text}: the ranks did not exit in time", NodeExit.CANCELLED
            ending = Ending(code=int(code), reason=why, cause=Cause.CANCELLED)
            self.leader.decision.make(ending)
        elif reason is Reason.END:
            self.cancel()
        elif self.reason is None:
            self.reason = reason
            self._tasks.start(self._leave(reason))

    def saved(self) -> None:
        """Record that a checkpoint is complete."""
        if self.reason is not None:
            self._after(LEAVE_S)

    async def _end_or_leave(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_end(), WORD_S)
        await self._request(Reason.PREEMPT)
        self._is_ending = False

    async def _until_end(self) -> None:
        while await self.disk.do(self._requested) is not Reason.END:
            await asyncio.sleep(LOOK_S)

    async def _request(self, reason: Reason) -> None:
        """Request an interruption, but handle an earlier request if the disk has one."""

        def first_request() -> Reason | None:
            write_request(self.request, reason)
            return self._requested()

        first: Reason | None = None
        with contextlib.suppress(asyncio.TimeoutError):
            first = await asyncio.wait_for(self.disk.do(first_request), REQUEST_S)
        self._interrupt(first or reason)

    async def _leave(self, reason: Reason) -> None:
        self.say(f"{reason.text}: the ranks are asked to save and exit")
        self.happened("interrupted", reason=reason.value, heard=self.page.is_used)
        if reason in (Reason.TIME_LIMIT, Reason.SIGNAL):
            self._after(max(0.8 * self.warning_s, self.warning_s - LAST_S))
        if not self.page.is_used:
            self.say("no rank has called runtime.should_checkpoint() yet; ranks save when they do")
            self._is_unheard = True
        for _ in range(TRIES):
            if await self._saving.agree():
                return
            self.say("not all nodes answered: the ranks could not be asked to save")

    def _after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._end_as_interrupted)

    def _end_as_interrupted(self) -> None:
        """End ranks that did not exit, if there is a checkpoint to continue from."""
        if self.has_saved():
            self.leader.decision.make(self._interrupted())

    def _completion(self) -> Ending:
        """Return how a training without failures ended: interrupted or complete."""
        is_left = self.reason is not None and self.page.has_left and not self.is_through()
        return self._interrupted() if is_left else Ending.completed()

    def _interrupted(self) -> Ending:
        reason = self.reason or Reason.PREEMPT
        code = int(NodeExit.CANCELLED if reason is Reason.CANCEL else NodeExit.INTERRUPTED)
        text = reason.text
        return Ending(code=code, reason=text, cause=Cause.INTERRUPTED, interruption=reason)
