"""What interrupts an attempt from outside, and how the ranks hear of it: the head's task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from clusterrun.node.agent.shared_disk import SharedDisk
from clusterrun.node.agent.tasks import Tasks
from clusterrun.node.link.head import Head
from clusterrun.node.recovery.causes import Cause, Ending, NodeExit
from clusterrun.node.watch.saving import Page, Saving
from clusterrun.rundir.request import Reason, read_request, write_request

LOOK_S = 0.05
WORD_S = 0.5  # how long the batch shell may take to say that SIGTERM is a cancellation
CLAIM_S = 5.0  # for the disk to say who interrupted first
LEAVE_S = 60.0  # how long ranks that have saved may go on
LAST_S = 30.0  # of a long warning, to end the ranks and say how to go on; of a short one a fifth
TRIES = 3  # to have all ranks save, where nodes do not answer


class Interruption:
    """Turn signals and requests into a save that all ranks make at one step.

    `cancel` ends the attempt without one; `warning_s` is how long before the time limit Slurm
    warns; `has_saved` says that there is a checkpoint to go on from, `is_through` that the last
    step is done. `reason` is None until the ranks are to leave.
    """

    def __init__(
        self,
        *,
        request: Path,
        page: Page,
        leader: Head,
        warning_s: float,
        happened: Callable[..., None],
        say: Callable[[str], None],
        cancel: Callable[[], None],
        has_saved: Callable[[], bool],
        is_through: Callable[[], bool],
        disk: SharedDisk,
    ) -> None:
        self._request, self._page, self._leader = request, page, leader
        self._warning_s, self._happened, self._say = warning_s, happened, say
        self._cancel, self._has_saved, self._is_through = cancel, has_saved, is_through
        self._saving, self._disk = Saving(page, leader.questions), disk
        self._tasks = Tasks()
        self._is_ending = False
        self.reason: Reason | None = None
        leader.interrupted = self.ending
        leader.decision.completion = self._completion

    def warned(self) -> None:
        """Do what is requested; Slurm's own signal, without a request, warns of the time limit."""
        self._tasks.start(self._claim(Reason.TIME_LIMIT))

    def ending(self) -> None:
        """Take SIGTERM: a preemption, unless the batch shell says that the job is to end."""
        if not self._page.is_used:
            self._cancel()
        elif not self._is_ending:  # all nodes get SIGTERM, and say so
            self._is_ending = True
            self._tasks.start(self._end_or_leave())

    async def look(self) -> None:
        """Do what is requested, however one hears of it: signals only make that quicker."""
        if reason := await self._disk.do(self._requested):
            self._interrupt(reason)

    def _interrupt(self, reason: Reason) -> None:
        if reason is Reason.END and self.reason is Reason.TIME_LIMIT:
            code, why = (
                int(NodeExit.CANCELLED),
                f"{self.reason.text}: the ranks had not left by then",
            )
            self._leader.decision.make(Ending(code=code, reason=why, cause=Cause.CANCELLED))
        elif reason is Reason.END:
            self._cancel()
        elif self.reason is None:
            self.reason = reason
            self._tasks.start(self._leave(reason))

    def saved(self) -> None:
        """Take note that a checkpoint is complete."""
        if self.reason is not None:
            self._after(LEAVE_S)

    def _requested(self) -> Reason | None:
        """Read who interrupts the attempt; None if nobody does."""
        return read_request(self._request)

    async def _end_or_leave(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_end(), WORD_S)
        await self._claim(Reason.PREEMPT)
        self._is_ending = False

    async def _until_end(self) -> None:
        while await self._disk.do(self._requested) is not Reason.END:
            await asyncio.sleep(LOOK_S)

    async def _claim(self, reason: Reason) -> None:
        """Leave word of a reason and do what the first word says; a disk that stalls says none."""

        def claimed() -> Reason | None:
            write_request(self._request, reason)
            return self._requested()

        first: Reason | None = None
        with contextlib.suppress(asyncio.TimeoutError):
            first = await asyncio.wait_for(self._disk.do(claimed), CLAIM_S)
        self._interrupt(first or reason)

    async def _leave(self, reason: Reason) -> None:
        self._say(f"{reason.text}: the ranks are asked to save and leave")
        self._happened("interrupted", reason=reason.value, heard=self._page.is_used)
        if reason is Reason.TIME_LIMIT:
            self._after(max(0.8 * self._warning_s, self._warning_s - LAST_S))
        if not self._page.is_used:
            self._say("no rank has asked runtime.should_checkpoint() yet: it may never hear of it")
        for _ in range(TRIES):
            if await self._saving.agree():
                return
            self._say("not all nodes answered: the ranks could not be told to save")

    def _after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._end_as_interrupted)

    def _end_as_interrupted(self) -> None:
        """End ranks that were told and did not leave, where a checkpoint is there to go on from."""
        if self._has_saved():
            self._leader.decision.make(self._interrupted())

    def _completion(self) -> Ending:
        """Tell a training that was interrupted from one that is complete."""
        is_left = self.reason is not None and self._page.has_left and not self._is_through()
        return self._interrupted() if is_left else Ending.completed()

    def _interrupted(self) -> Ending:
        reason = self.reason or Reason.PREEMPT
        code = NodeExit.CANCELLED if reason is Reason.CANCEL else NodeExit.INTERRUPTED
        return Ending(
            code=int(code), reason=reason.text, cause=Cause.INTERRUPTED, interruption=reason
        )
