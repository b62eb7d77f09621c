"""What interrupts an attempt from outside, and how the ranks hear of it: the head's task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from clusterrun.node.endings import Cause, Ending, NodeExit
from clusterrun.node.link import Leader
from clusterrun.node.request import Reason, read_request, write_request
from clusterrun.node.saving import Page, Saving

LOOK_S = 0.05
WORD_S = 0.5  # how long the batch shell may take to say that SIGTERM is a cancellation
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
        leader: Leader,
        warning_s: float,
        happened: Callable[..., None],
        say: Callable[[str], None],
        cancel: Callable[[], None],
        has_saved: Callable[[], bool],
        is_through: Callable[[], bool],
    ) -> None:
        self._request, self._page, self._leader = request, page, leader
        self._warning_s, self._happened, self._say = warning_s, happened, say
        self._cancel, self._has_saved, self._is_through = cancel, has_saved, is_through
        self._saving = Saving(page, leader.questions)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self.reason: Reason | None = None
        leader.interrupted = self.ending
        leader.complete_with(self._completion)

    def warned(self) -> None:
        """Do what is requested; Slurm's own signal, without a request, warns of the time limit."""
        write_request(self._request, Reason.TIME_LIMIT)
        self._interrupt(self.requested() or Reason.TIME_LIMIT)

    def ending(self) -> None:
        """Take SIGTERM: a preemption, unless the batch shell says that the job is to end."""
        if not self._page.is_used:
            self._cancel()
        elif not self._is_ending:  # all nodes get SIGTERM, and say so
            self._is_ending = True
            self._start(self._end_or_leave())

    def look(self) -> None:
        """Do what is requested, however one hears of it: signals only make that quicker."""
        if reason := self.requested():
            self._interrupt(reason)

    def _interrupt(self, reason: Reason) -> None:
        if reason is Reason.END and self.reason is Reason.TIME_LIMIT:
            code, why = (
                int(NodeExit.CANCELLED),
                f"{self.reason.text}: the ranks had not left by then",
            )
            self._leader.conclude(Ending(code=code, reason=why, cause=Cause.CANCELLED))
        elif reason is Reason.END:
            self._cancel()
        elif self.reason is None:
            self.reason = reason
            self._start(self._leave(reason))

    def saved(self) -> None:
        """Take note that a checkpoint is complete."""
        if self.reason is not None:
            self._after(LEAVE_S)

    def requested(self) -> Reason | None:
        """Read who interrupts the attempt; None where nobody does."""
        return read_request(self._request)

    async def _end_or_leave(self) -> None:
        for _ in range(int(WORD_S / LOOK_S)):
            if self.requested() is Reason.END:
                break
            await asyncio.sleep(LOOK_S)
        self._is_ending = False
        write_request(self._request, Reason.PREEMPT)
        self._interrupt(self.requested() or Reason.PREEMPT)

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
            self._leader.conclude(self._interrupted())

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

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
