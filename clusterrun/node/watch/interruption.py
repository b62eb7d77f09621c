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
from clusterrun.rundir.end import Reason, read_request, write_request
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
# Scripts save in handlers of these; one that handles several gets the first one.
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
HANDLERS_S = 1.0  # between two reads of which signals ranks handle
DELIVERY_S = 0.5  # for Slurm to signal all processes of a node
RECENT_S = 10.0  # earlier signals were a person's
_CAUGHT = r"(?m)^SigCgt:\s*([0-9a-f]+)"
# Ends of ranks that may follow from the signal that they have handled.
_BY_HANDLER = (Cause.EXIT, Cause.SIGNAL, Cause.LAUNCHER, Cause.CANCELLED)


@dataclass(kw_only=True)
class Interruption:
    """Turn signals and requests into a save at one step, or in the ranks' own handlers."""

    request: Path
    head: Head
    warning_s: float  # so long before the time limit, Slurm warns
    happened: Callable[..., None]
    say: Callable[[str], None]
    account: Account
    disk: SharedDisk
    tasks: Tasks  # those of the attempt
    named: tuple[int, ...] = ()  # signals that handlers get first before the time limit
    end_s: float = float("inf")  # that handlers have at the end; with a queue, Slurm limits it
    reason: Reason | None = None  # None until the ranks must exit
    is_used: bool = False  # a rank has called should_checkpoint()
    _is_ending: bool = False  # agents got SIGTERM, and it is not yet known why
    _is_over: bool = False  # an end of the job was requested
    _is_asking: bool = False  # it is not yet known how many ranks handle a signal
    _is_handled: bool = False  # a rank handles a signal that it got
    _left: int = 0  # ranks that still handle a signal
    _is_unheard: bool = False  # no rank could be asked yet

    def __post_init__(self) -> None:
        """Have the decision ask this whether to wait, and how an attempt without failures ended."""
        self._requested = partial(read_request, self.request)
        self.head.decision.completion = self._completion
        self.head.decision.is_held = lambda: self._is_ending or self._is_asking or self._left > 0

    def handle_warning(self, *, are_caught: bool) -> None:
        """Handle a warning signal; `are_caught`: ranks of the first node handle it themselves."""
        left_s = time_left_s(os.environ, time.time()) or 0.0  # unknown: the limit may be near
        reason = warning_reason(left_s, self.warning_s)
        self.tasks.start(self._request_unless_theirs(reason, are_caught))

    async def _request_unless_theirs(self, reason: Reason, are_caught: bool) -> None:
        """Request the interruption, unless the signal is for handlers of the script."""
        is_theirs = not self.is_used and are_caught
        if reason is Reason.SIGNAL and is_theirs and await self.disk.do(self._requested) is None:
            return  # a person has signalled the whole step, and so also the ranks
        await self._request(reason)

    def handle_sigterm(self) -> None:
        """Handle SIGTERM to agents whose ranks can save: a preemption, unless an end follows."""
        if not self._is_ending:  # all nodes get SIGTERM, and report it
            self._is_ending = True
            self.tasks.start(self._end_or_leave())

    async def check_request(self) -> None:
        """Act on a request that came without a signal; warn ranks again until they have left."""
        is_heard_now = self.is_used or self._is_handled
        if self._is_unheard and self.reason and is_heard_now:
            self._is_unheard = False
            self.happened("interrupted", reason=self.reason.value, heard=True)
        # Again: to count the ranks that are left, and for handlers that were set since.
        if self._is_handled or (self.reason and not self.is_used):
            await self._warn_ranks()
        if reason := await self.disk.do(self._requested):
            self._interrupt(reason)

    def _interrupt(self, reason: Reason) -> None:
        """Act on a request once: END ends the attempt, any other reason has all ranks leave."""
        if reason is Reason.END and not self._is_over:
            self._is_over = True
            self.tasks.start(self._end_attempt())
        elif reason is not Reason.END and self.reason is None:
            self.reason = reason
            self.tasks.start(self._have_ranks_leave(reason))
        else:  # it is handled already
            self._end_hold()

    def saved(self) -> None:
        """Record that a checkpoint is complete."""
        if self.reason is not None:
            self._after(LEAVE_S, self._end_as_interrupted)

    async def _end_attempt(self) -> None:
        """End the attempt; ranks that handle a signal have as long as Slurm would give them."""
        # Without a queue (`end_s` is finite), ranks only have from the warning to the time limit.
        had_their_time = self.reason is Reason.TIME_LIMIT and self.end_s < float("inf")
        is_awaited = not had_their_time and await self._warn_ranks()
        self._end_hold()
        if is_awaited:
            self._after(self.end_s, self._stop_nodes)
        else:
            self._stop_nodes()

    def _stop_nodes(self) -> None:
        """Stop all nodes: the job was cancelled."""
        # Handlers that still run would hold a failure, and the time limit has a reason of its own.
        if self.reason is Reason.TIME_LIMIT or self._is_handled:
            self.head.decision.make(self._cancelled())
        else:
            self.head.report_failure(cancelled(self.head.names[0] if self.head.names else ""))

    def _cancelled(self) -> Ending:
        late = f"{Reason.TIME_LIMIT.text}: the ranks did not exit in time"
        why = late if self.reason is Reason.TIME_LIMIT else Reason.END.text
        return Ending(code=int(NodeExit.CANCELLED), reason=why, cause=Cause.CANCELLED)

    async def _warn_ranks(self) -> bool:
        """Signal the ranks of all nodes that handle a warning; return whether any still handles it.

        Ranks that call should_checkpoint() get at most SIGTERM, as from Slurm at the end of a job:
        they save without a signal.
        """
        only = (signal.SIGTERM,) if self.is_used else SAVE_SIGNALS
        first = self.named if self.reason is Reason.TIME_LIMIT and not self._is_over else ()
        self._is_asking = True
        answers = await self.head.questions.ask("warn", only=only, first=first)  # OwnSignals.warn
        self._is_asking = False
        counts, were_waiting = [*answers.given.values()], self._left > 0
        self._is_handled |= any(node["warned"] for node in counts)
        self._left = sum(node["left"] for node in counts)
        if self._left and not were_waiting:
            self.say(f"waiting for the script's own signal handler in {count(self._left, 'rank')}")
        have_all_left = self._is_handled and not self._left
        # A training that has reported its last step, and not failed, is complete.
        if have_all_left and (self.head.decision.failures or not self.account.is_at_last_step):
            self.head.decision.make(self._interrupted())
        self.head.check_complete()
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

    async def _have_ranks_leave(self, reason: Reason) -> None:
        """Have all ranks save and exit: those that handle a signal by it, others at one step."""
        self.say(f"{reason.text}: the ranks are asked to save and exit")
        if not self.is_used:
            await self._warn_ranks()
        self._end_hold()
        self.happened("interrupted", reason=reason.value, heard=self.is_used or self._is_handled)
        self._limit_time(reason)
        if self._is_handled:
            return
        if not self.is_used:
            self.say("no rank has called runtime.should_checkpoint() yet: each saves at that call")
            self._is_unheard = True
        for request in range(1, TRIES + 1):
            if await agree(self.head.questions, request):
                return
            self.say("not all nodes answered: the ranks could not be asked to save")

    def _limit_time(self, reason: Reason) -> None:
        """End ranks that do not exit, last those with handlers; after a preemption, Slurm does."""
        if reason is Reason.PREEMPT:
            return
        if reason in (Reason.TIME_LIMIT, Reason.SIGNAL):
            patience_s = max(0.8 * self.warning_s, self.warning_s - LAST_S)
            self._after(patience_s, self._end_as_interrupted)
        left_s = self.warning_s
        if reason is Reason.TIME_LIMIT and self.end_s == float("inf"):  # Slurm knows the time left
            left_s = time_left_s(os.environ, time.time()) or left_s
        self._after(left_s - KILL_S, self._end_handlers)

    def _end_hold(self) -> None:
        """Let the attempt end: it is known now why the agents got SIGTERM, if they did."""
        self._is_ending = False
        self.head.check_complete()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds < float("inf"):
            asyncio.get_running_loop().call_later(seconds, action)

    def _end_as_interrupted(self) -> None:
        """End ranks that did not exit, if there is a checkpoint and no handler still runs."""
        if self.account.checkpoint is not None and not self._left:
            self.head.decision.make(self._interrupted())

    def _end_handlers(self) -> None:
        """End ranks that still handle a signal, if there is a checkpoint or a user cancelled."""
        if self._left and (self.account.checkpoint is not None or self.reason is Reason.CANCEL):
            self.head.decision.make(self._interrupted())

    def _completion(self) -> Ending:
        """Return how a training without failures ended; handlers may exit without should_stop()."""
        have_stopped = any(peer.left_as_asked for peer in self.head.peers.values())
        was_interrupted = self._is_handled or (self.reason is not None and have_stopped)
        is_early = was_interrupted and not self.account.is_at_last_step
        return self._interrupted() if is_early else Ending.completed()

    def _interrupted(self) -> Ending:
        """Return the ending of an interrupted attempt, with an error that the script had then."""
        own = [f for f in self.head.decision.failures if not f.has_lost_peer]
        errors = [failure for failure in own if failure.cause not in _BY_HANDLER]
        is_handled = self._is_handled and not self._left and not errors
        if self._is_over and self.reason is not Reason.TIME_LIMIT:
            return replace(self._cancelled(), is_handled=is_handled)
        reason = self.reason or Reason.PREEMPT
        return Ending(
            code=int(NodeExit.CANCELLED if reason is Reason.CANCEL else NodeExit.INTERRUPTED),
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
    have_all_answered = bool(calls) and not answers.silent
    at = max(calls) + 1 if have_all_answered else 0  # 0: the ranks only continue
    await questions.ask("decide", request=request, at=at)
    return at


def handled_signals(pid: int) -> frozenset[int]:
    """Return for which of SAVE_SIGNALS a process has handlers (proc(5)); none if it is gone."""
    with contextlib.suppress(OSError):
        if found := re.search(_CAUGHT, Path(f"/proc/{pid}/status").read_text(errors="replace")):
            mask = int(found[1], 16)  # bit N - 1 stands for signal N
            return frozenset(number for number in SAVE_SIGNALS if mask >> (number - 1) & 1)
    return frozenset()


def choose(handled: Collection[int], first: Collection[int]) -> int:
    """Return the signal that warns a process, 0 for none; those in `first` are preferred."""
    return next((n for n in (*first, *SAVE_SIGNALS) if n in handled), 0)


def named_signals(request: str) -> tuple[int, ...]:
    """Return SIGUSR1 if slurm.signal names it; SIGUSR2 is also what clusterrun names."""
    name = request.rpartition(":")[2].partition("@")[0].upper()  # as in B:USR1@120
    return (int(signal.SIGUSR1),) if name.removeprefix("SIG") in ("USR1", "10") else ()


@dataclass(kw_only=True)
class OwnSignals:
    """The ranks of this node whose script handles a warning: SIGTERM, SIGUSR1 or SIGUSR2."""

    page: ControlPage
    pids: Callable[[], Mapping[int, int]]  # of the running ranks, by local rank
    is_in_step: bool = False  # Slurm may signal the ranks itself
    warned: set[int] = field(default_factory=set)  # the pids of those that got such a signal
    _handled: dict[int, set[int]] = field(default_factory=dict)  # by pid
    _delivered: dict[int, float] = field(default_factory=dict)  # when Slurm sent a signal
    _witness: Popen[bytes] | None = None  # it does nothing; a warning that Slurm sends ends it
    _read_at: float = 0.0

    @property
    def witnesses(self) -> list[int]:
        """The pid of the process that gets the same signals from Slurm as a rank."""
        return [self._witness.pid] if self._witness else []

    @property
    def are_caught(self) -> bool:
        """Return whether a rank of this node handles a warning itself."""
        self.read_handlers(after_s=0.0)
        return any(self._handled.values())

    def read_handlers(self, after_s: float = HANDLERS_S) -> None:
        """Read which signals each rank handles, unless that was done less than `after_s` ago.

        `warn` counts also ranks that have ended since: some do as soon as Slurm signals them.
        """
        self._watch_slurm()
        if time.monotonic() - self._read_at < after_s:
            return
        self._read_at = time.monotonic()
        for rank, pid in self.pids().items():
            found = handled_signals(pid)
            self._handled[pid] = {n for n in found if not self.page.does_not_save_on(rank, n)}

    def _watch_slurm(self) -> None:
        """Note which signal Slurm has sent to the step, if one has ended the witness; renew it."""
        code = self._witness.poll() if self._witness is not None else None
        if code is not None:
            number, self._witness = -code, None
            self._delivered[number] = time.monotonic()
            # Ranks may restore the default once they have handled SIGTERM, and seem unwarned then.
            # Other signals count in `warn` if they are recent: a person may have sent them, too.
            if number == signal.SIGTERM:
                self.warned |= {pid for pid, handled in self._handled.items() if number in handled}
        if self.is_in_step and self._witness is None:
            with contextlib.suppress(OSError):
                self._witness = Popen(
                    ["cat"], stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
                )  # in its own session, as ranks are; it ends with its input: with this process

    async def warn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send one signal to each rank that handles a warning, unless it has had one.

        The message has the signals to choose from (`only`) and those that are preferred (`first`).
        Return how many ranks were warned, and how many of them still run.
        """
        if self.is_in_step and self.are_caught and not self.warned:
            await asyncio.sleep(DELIVERY_S)  # Slurm may be signalling them now: once is enough
        self.read_handlers(after_s=0.0)
        running, only, now = {*self.pids().values()}, {*message["only"]}, time.monotonic()
        delivered = [n for n, at in self._delivered.items() if now - at < RECENT_S]
        for pid, handled in self._handled.items():  # also of ranks that have ended
            number = choose(handled & only, (*delivered, *message["first"]))
            if pid in self.warned or not number:
                continue
            if number in delivered:
                self.warned.add(pid)  # Slurm has sent it
            elif pid in running:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                    self.warned.add(pid)
        return {"warned": len(self.warned), "left": len(self.warned & running)}
