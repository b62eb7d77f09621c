"""Handle interruptions from outside: have all ranks save at the same step and exit.

Scripts may save in their own handlers instead, as by hand. Slurm may have signalled their ranks:
that depends on its process tracking. A process of the step that does nothing else shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any

from clusterrun.node.base.causes import (
    Cause,
    Ending,
    NodeExit,
    cancelled,
    time_left_s,
    warning_reason,
)
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.rundir.outcome import Reason, read_request, write_request
from clusterrun.shared.control_page import ControlPage, SavePoint
from clusterrun.shared.wording import count

if TYPE_CHECKING:  # slow to import, and agents need none
    from clusterrun.node.link.head import Head, Questions
    from clusterrun.node.recovery.conclude import Account

SETTLE_S = 0.02  # for a rank that looked just before the hold to publish its count
LOOK_S = 0.05
WORD_S = 0.5  # how long the conductor may take to request an end when Slurm sends SIGTERM
REQUEST_S = 5.0  # how long the disk may take to show which request was first
LEAVE_S = 60.0  # how long ranks may keep running after a save
LAST_S = 30.0  # of a long warning, to end the ranks and the job; a fifth of a short one
KILL_S = 3.0  # the same for ranks that save in their own handlers: these have the rest
TRIES = 3  # attempts to have all ranks save if nodes do not answer
# A script that catches several gets the first one.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
CAUGHT_S = 1.0  # between two looks at what ranks catch
DELIVERY_S = 0.5  # for Slurm to signal all processes of a node
RECENT_S = 10.0  # earlier signals were a person's
_CAUGHT = r"(?m)^SigCgt:\s*([0-9a-f]+)"
# Ends of ranks that may follow from the signal that they have handled.
_BY_HANDLER = (Cause.EXIT, Cause.SIGNAL, Cause.LAUNCHER, Cause.CANCELLED)


@dataclass(kw_only=True)
class Interruption:
    """Turn signals and requests into a save that all ranks make at one step.

    Ranks that save in handlers of their own get a signal instead, before the time limit one of
    `named` if they handle it; at the end they have `end_s`. Slurm warns `warning_s` before the time
    limit. `is_used`: a rank has called should_checkpoint(). `reason` is None until the ranks must
    exit. `tasks` are those of the attempt.
    """

    request: Path
    head: Head
    warning_s: float
    happened: Callable[..., None]
    say: Callable[[str], None]
    account: Account
    disk: SharedDisk
    tasks: Tasks
    named: tuple[int, ...] = ()
    end_s: float = float("inf")
    reason: Reason | None = None
    is_used: bool = False
    _is_ending: bool = False
    _is_over: bool = False
    _is_asking: bool = False
    _is_handled: bool = False
    _left: int = 0  # ranks that still handle a signal
    _is_unheard: bool = False

    def __post_init__(self) -> None:
        """Handle the end of the ranks."""
        self._requested = partial(read_request, self.request)
        self.head.decision.completion = self._completion
        self.head.decision.is_held = lambda: self._is_ending or self._is_asking or self._left > 0

    def warned(self, *, are_caught: bool) -> None:
        """Handle a request, or without one the time limit or a person's signal.

        `are_caught`: ranks of the first node handle warnings themselves.
        """
        left_s = time_left_s(os.environ, time.time()) or 0.0
        self.tasks.start(self._warned(warning_reason(left_s, self.warning_s), are_caught))

    async def _warned(self, reason: Reason, are_caught: bool) -> None:
        is_theirs = not self.is_used and are_caught
        if reason is Reason.SIGNAL and is_theirs and await self.disk.do(self._requested) is None:
            return  # a person's signal for the ranks of the whole step
        await self._request(reason)

    def ending(self) -> None:
        """Handle SIGTERM to agents whose ranks can save: a preemption, unless an end follows."""
        if not self._is_ending:  # all nodes get SIGTERM, and report it
            self._is_ending = True
            self.tasks.start(self._end_or_leave())

    async def look(self) -> None:
        """Handle a request, even without a signal. Record when the first rank can be asked."""
        if self._is_unheard and self.reason and (self.is_used or self._is_handled):
            self._is_unheard = False
            self.happened("interrupted", reason=self.reason.value, heard=True)
        if self._is_handled or (self.reason and not self.is_used):
            await self._warn_ranks()
        if reason := await self.disk.do(self._requested):
            self._interrupt(reason)

    def _interrupt(self, reason: Reason) -> None:
        if reason is Reason.END and not self._is_over:
            self._is_over = True
            self.tasks.start(self._end())
        elif reason is not Reason.END and self.reason is None:
            self.reason = reason
            self.tasks.start(self._leave(reason))
        else:
            self._settle()

    def saved(self) -> None:
        """Record that a checkpoint is complete."""
        if self.reason is not None:
            self._after(LEAVE_S, self._end_as_interrupted)

    async def _end(self) -> None:
        """End the attempt; ranks that handle a signal have as long as Slurm would give them."""
        had_warning = self.reason is Reason.TIME_LIMIT and self.end_s < float("inf")
        is_awaited = not had_warning and await self._warn_ranks()
        self._settle()
        if is_awaited:
            self._after(self.end_s, self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        if self.reason is Reason.TIME_LIMIT or self._is_handled:
            self.head.decision.make(self._cancelled())
        else:
            self.head.report_failure(cancelled(next(iter(self.head.names), "")))

    def _cancelled(self) -> Ending:
        late = f"{Reason.TIME_LIMIT.text}: the ranks did not exit in time"
        why = late if self.reason is Reason.TIME_LIMIT else Reason.END.text
        return Ending(code=int(NodeExit.CANCELLED), reason=why, cause=Cause.CANCELLED)

    async def _warn_ranks(self) -> bool:
        """Warn the ranks of all nodes that handle a warning; return whether any still handles it.

        Ranks that use our save points have no need of one; if they are ended, Slurm's is SIGTERM.
        """
        only = (signal.SIGTERM,) if self.is_used else WARNINGS
        first = self.named if self.reason is Reason.TIME_LIMIT and not self._is_over else ()
        self._is_asking = True
        answers = await self.head.questions.ask("warn", only=only, first=first)
        self._is_asking = False
        counts, had_left = [*answers.given.values()], self._left
        self._is_handled |= any(each["warned"] for each in counts)
        self._left = sum(each["left"] for each in counts)
        if self._left and not had_left:
            self.say(f"waiting for the script's own signal handler in {count(self._left, 'rank')}")
        is_open = self.head.decision.failures or not self.account.is_through
        if self._is_handled and not self._left and is_open:
            self.head.decision.make(self._interrupted())
        self.head.look_around()
        return self._left > 0

    async def _end_or_leave(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_end(), WORD_S)
        await self._request(Reason.PREEMPT)

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
        if not self.is_used:
            await self._warn_ranks()
        self._settle()
        heard = self.is_used or self._is_handled
        self.happened("interrupted", reason=reason.value, heard=heard)
        if reason in (Reason.TIME_LIMIT, Reason.SIGNAL):
            last_s = max(0.8 * self.warning_s, self.warning_s - LAST_S)
            self._after(last_s, self._end_as_interrupted)
        if reason is not Reason.PREEMPT:  # there Slurm ends them, after its grace time
            is_limit = reason is Reason.TIME_LIMIT and self.end_s == float("inf")
            left_s = time_left_s(os.environ, time.time()) if is_limit else None
            self._after((left_s or self.warning_s) - KILL_S, self._end_handlers)
        if self._is_handled:
            return
        if not self.is_used:
            self.say("no rank has called runtime.should_checkpoint() yet; ranks save when they do")
            self._is_unheard = True
        for request in range(1, TRIES + 1):
            if await agree(self.head.questions, request):
                return
            self.say("not all nodes answered: the ranks could not be asked to save")

    def _settle(self) -> None:
        """Settle what was held back until it was known why the agents got SIGTERM."""
        self._is_ending = False
        self.head.look_around()

    def _after(self, seconds: float, deed: Callable[[], None]) -> None:
        if seconds < float("inf"):
            asyncio.get_running_loop().call_later(seconds, deed)

    def _end_as_interrupted(self) -> None:
        """End ranks that did not exit, if there is a checkpoint to continue from."""
        if self.account.checkpoint is not None and not self._left:
            self.head.decision.make(self._interrupted())

    def _end_handlers(self) -> None:
        """End ranks that still handle a signal; without a checkpoint, they have the whole limit."""
        if self._left and (self.account.checkpoint is not None or self.reason is Reason.CANCEL):
            self.head.decision.make(self._interrupted())

    def _completion(self) -> Ending:
        """Return how a training without failures ended: interrupted or complete."""
        have_left = any(peer.has_left for peer in self.head.peers.values())
        has_left = self._is_handled or (self.reason is not None and have_left)
        is_early = has_left and not self.account.is_through
        return self._interrupted() if is_early else Ending.completed()

    def _interrupted(self) -> Ending:
        own = [f for f in self.head.decision.failures if not f.has_lost_peer]
        errors = [failure for failure in own if failure.cause not in _BY_HANDLER]
        is_handled = self._is_handled and not self._left and not errors
        if self._is_over and self.reason is not Reason.TIME_LIMIT:
            return replace(self._cancelled(), is_handled=is_handled)
        reason = self.reason or Reason.PREEMPT
        code = int(NodeExit.CANCELLED if reason is Reason.CANCEL else NodeExit.INTERRUPTED)
        return Ending(
            code=code,
            reason="; ".join([reason.text, *(error.sentence() for error in errors[:1])]),
            cause=Cause.INTERRUPTED,
            interruption=reason,
            is_handled=is_handled,
        )


async def hold(page: ControlPage, message: Mapping[str, Any]) -> dict[str, Any]:
    """Have the ranks of this node wait, and return the highest count of calls."""
    page.hold(int(message["request"]))
    await asyncio.sleep(SETTLE_S)
    return {"calls": max(map(page.calls, page.ranks))}


def decide(page: ControlPage, message: Mapping[str, Any]) -> dict[str, Any]:
    """Let the ranks of this node continue to the call at which they save and exit."""
    page.decide(SavePoint(int(message["request"]), int(message["at"])))
    return {}


async def agree(questions: Questions, request: int) -> int:
    """Have all ranks save and exit at one call; return it, 0 if a node does not answer."""
    answers = await questions.ask("hold", request=request)
    calls = [int(each["calls"]) for each in answers.given.values()]
    at = 1 + max(calls) if calls and not answers.silent else 0
    await questions.ask("decide", request=request, at=at)
    return at


def caught(pid: int) -> frozenset[int]:
    """Return which warnings a process has handlers for (proc(5)); none if it is gone."""
    with contextlib.suppress(OSError):
        if found := re.search(_CAUGHT, Path(f"/proc/{pid}/status").read_text(errors="replace")):
            return frozenset(n for n in WARNINGS if int(found[1], 16) >> n - 1 & 1)
    return frozenset()


def choose(handled: Collection[int], first: Collection[int]) -> int:
    """Return the signal that warns a process, 0 for none; those in `first` are preferred."""
    return next((n for n in (*first, *WARNINGS) if n in handled), 0)


def named_signals(request: str) -> tuple[int, ...]:
    """Return SIGUSR1 if slurm.signal names it; SIGUSR2 is also what clusterrun names."""
    name = request.rpartition(":")[2].partition("@")[0].upper()
    return (int(signal.SIGUSR1),) if name.removeprefix("SIG") in ("USR1", "10") else ()


@dataclass(kw_only=True)
class OwnSignals:
    """The ranks of this node that catch warnings, and those that were warned.

    `pids` returns the running ranks by local rank. With `is_in_step`, Slurm may signal them itself.
    """

    page: ControlPage
    pids: Callable[[], Mapping[int, int]]
    is_in_step: bool = False
    warned: set[int] = field(default_factory=set)
    _handled: dict[int, set[int]] = field(default_factory=dict)
    _delivered: dict[int, float] = field(default_factory=dict)
    _witness: Popen[bytes] | None = None
    _looked_at: float = 0.0

    @property
    def witnesses(self) -> list[int]:
        """The pid of the process that gets the same signals from Slurm as a rank."""
        return [self._witness.pid] if self._witness else []

    @property
    def are_caught(self) -> bool:
        """Return whether a rank of this node handles a warning itself."""
        self.look(after_s=0.0)
        return any(self._handled.values())

    def look(self, after_s: float = CAUGHT_S) -> None:
        """Note now and then what the ranks catch: some end as soon as they are signalled."""
        self._watch_slurm()
        if time.monotonic() - self._looked_at < after_s:
            return
        self._looked_at = time.monotonic()
        for rank, pid in self.pids().items():
            self._handled[pid] = {n for n in caught(pid) if not self.page.is_shielded(rank, n)}

    def _watch_slurm(self) -> None:
        if self._witness is not None and (code := self._witness.poll()) is not None:
            self._delivered[-code] = time.monotonic()
            if -code == signal.SIGTERM:  # ranks may restore the default once they have handled it
                self.warned |= {pid for pid, handled in self._handled.items() if -code in handled}
            self._witness = None
        if self.is_in_step and self._witness is None:
            with contextlib.suppress(OSError):  # it ends with this process, at the end of its input
                self._witness = Popen(
                    ["cat"], 0, None, PIPE, DEVNULL, DEVNULL, start_new_session=True
                )

    async def warn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Warn the ranks that handle a warning and were not warned; count these, and who is left.

        `first` is preferred to SIGTERM, `only` is what may be sent; Slurm's own signals count.
        """
        if self.is_in_step and self.are_caught and not self.warned:
            await asyncio.sleep(DELIVERY_S)
        self.look(after_s=0.0)
        running, only, now = {*self.pids().values()}, {*message["only"]}, time.monotonic()
        delivered = [n for n, at in self._delivered.items() if now - at < RECENT_S]
        for pid, handled in self._handled.items():
            number = choose(handled & only, (*delivered, *message["first"]))
            if pid in self.warned or not number:
                continue
            if number in delivered:
                self.warned.add(pid)
            elif pid in running:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                    self.warned.add(pid)
        return {"warned": len(self.warned), "left": len(self.warned & running)}
