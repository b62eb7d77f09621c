"""What interrupts an attempt from outside, and how the ranks hear of it: the head's task."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from enum import Enum
from pathlib import Path
from typing import Any

from clusterrun.control import Action
from clusterrun.node.endings import Cause, Ending, NodeExit
from clusterrun.node.link import Leader
from clusterrun.node.saving import Page, Saving

LOOK_S = 0.05
WORD_S = 0.5  # how long the batch shell may take to say that SIGTERM is a cancellation
LEAVE_S = 60.0  # how long ranks that have saved may go on
PATIENCE = 0.8  # of the warning; then there is just time to end the ranks and say how to go on


class Reason(str, Enum):
    """What is in an attempt's `request`: why it is interrupted."""

    END = "end"
    CANCEL = "cancel"
    SAVE = "save"
    TIME_LIMIT = "time-limit"
    PREEMPT = "preempt"

    @property
    def text(self) -> str:
        """Word it for people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.END: "cancelled",
    Reason.CANCEL: "cancelled, after a checkpoint",
    Reason.SAVE: "asked for a checkpoint",
    Reason.TIME_LIMIT: "the time limit",
    Reason.PREEMPT: "preempted",
}


class Interruption:
    """Turn signals and requests into a save that all ranks make at one step.

    `cancel` ends the attempt without one; `warning_s` is how long before the time limit Slurm
    warns; `reason` is None until the ranks are to leave.
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
    ) -> None:
        self._request, self._page, self._leader = request, page, leader
        self._warning_s, self._happened, self._say = warning_s, happened, say
        self._cancel = cancel
        self._saving = Saving(page, leader.questions)
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_saved = False
        self._is_ending = False
        self.reason: Reason | None = None
        leader.interrupted = self.ending
        leader.complete_with(self._completion)

    def warned(self) -> None:
        """Do what the request says; Slurm's own signal, without one, warns of the time limit."""
        reason = self.requested() or self._claim(Reason.TIME_LIMIT)
        self._start(self._interrupt(reason))

    def ending(self) -> None:
        """Take SIGTERM: a preemption, unless the batch shell says that the job is to end."""
        if not self._page.is_used:
            self._cancel()
        elif not self._is_ending:  # all nodes get SIGTERM, and say so
            self._is_ending = True
            self._start(self._end_or_leave())

    def look(self) -> None:
        """Take a request that was written before anybody could be told."""
        if self.requested():
            self.warned()

    def saved(self) -> None:
        """Take note that a checkpoint is complete."""
        self._has_saved = True
        if self.reason is not None:
            self._after(LEAVE_S)

    def requested(self) -> Reason | None:
        """Read who interrupts the attempt; None where nobody does."""
        try:
            return Reason(self._request.read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None

    def _claim(self, reason: Reason) -> Reason:
        """Say why the attempt is interrupted; who said it first is right."""
        write_request(self._request, reason)
        return self.requested() or reason

    async def _end_or_leave(self) -> None:
        for _ in range(int(WORD_S / LOOK_S)):
            if self.requested() is Reason.END:
                break
            await asyncio.sleep(LOOK_S)
        if (reason := self._claim(Reason.PREEMPT)) is Reason.SAVE:
            await self._interrupt(reason)
            reason = self._claim(Reason.PREEMPT)
        await self._interrupt(reason)

    async def _interrupt(self, reason: Reason) -> None:
        if reason is Reason.END:
            self._cancel()
            return
        if reason is Reason.SAVE:
            with contextlib.suppress(OSError):
                self._request.unlink()  # there may be others
            await self._saving.agree(Action.SAVE)
            return
        if self.reason is not None:
            return
        self.reason = reason
        self._say(f"{reason.text}: the ranks are asked to save and leave")
        self._happened("interrupted", reason=reason.value)
        if reason is Reason.TIME_LIMIT:
            self._after(PATIENCE * self._warning_s)
        is_used = self._page.is_used
        if not await self._saving.agree(Action.LEAVE):
            self._say("not all nodes answered: the ranks were not told to save")
        elif not is_used:
            self._say("no rank has asked runtime.should_checkpoint() yet: it may never hear of it")

    def _after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._end_as_interrupted)

    def _end_as_interrupted(self) -> None:
        """End ranks that were told and did not leave, where a checkpoint is there to go on from."""
        if self._has_saved:
            self._leader.conclude(self._interrupted())

    def _completion(self) -> Ending:
        """Tell a training that was interrupted from one that is complete."""
        is_left = self.reason is not None and self._page.has_left
        return self._interrupted() if is_left else Ending.completed()

    def _interrupted(self) -> Ending:
        reason = self.reason or Reason.PREEMPT
        code = NodeExit.CANCELLED if reason is Reason.CANCEL else NodeExit.INTERRUPTED
        return Ending(code=int(code), reason=reason.text, cause=Cause.INTERRUPTED)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def write_request(path: Path, reason: Reason) -> None:
    """Leave word why an attempt is interrupted, unless somebody has."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{reason.value}\n")
