"""What happens between the attempts of a run: one loop for a job of Slurm and for this machine.

The conductor takes an attempt, starts its step, handles signals and requests, asks the rule book
what follows, and relaunches, requeues, submits a successor, or writes the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from clusterrun.errors import ClusterrunError, NodeExit, SchedulerUnreachableError, describe
from clusterrun.launch.plan import Plan
from clusterrun.node.agent.stderr import print_trouble, say_on_stderr
from clusterrun.node.conductor.host import Host, Step
from clusterrun.node.conductor.signals import held
from clusterrun.rundir.claims import claim, followed_by, take_attempt
from clusterrun.rundir.end import write_end
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.request import Reason, write_request
from clusterrun.shared.state import JobState

if TYPE_CHECKING:
    from clusterrun.node.recovery.rules import Decision

LOOK_S = 0.5
ROOM_S, ROOM_POLL_S = 600.0, 5.0  # how long to wait for a full disk
SILENCE_S = 5.0  # between two questions to a scheduler that does not answer
REQUEUE_TRIES = 6
LET_GO_S = 3.0  # for a step whose agents have left to end before it is killed

_Done = TypeVar("_Done")


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How this job ends; a state of None leaves the last word to whoever continues the run."""

    state: JobState | None
    code: int


ELSEWHERE = Finish(state=None, code=int(NodeExit.INTERRUPTED))


class _OverError(Exception):
    """The job ends here and now."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish)
        self.finish = finish


def ask_rule_book(run_dir: Path, attempt: int, code: int, environ: Mapping[str, str]) -> Decision:
    """Decide what follows an attempt. Raises OSError and ValueError."""
    from clusterrun.node.recovery.conclude import conclude

    return conclude(run_dir, attempt, code, environ)


@dataclass(kw_only=True)
class Conductor:
    """One job of a run, from its first attempt to its end.

    `hear` returns the signals that arrive within some seconds.
    """

    paths: RunPaths
    plan: Plan
    host: Host
    hear: Callable[[float], list[int]]
    decide: Callable[[Path, int, int, Mapping[str, str]], Decision] = ask_rule_book
    clock: Callable[[], float] = time.monotonic

    attempt: int = 0
    step: Step | None = None
    code: int = 0
    excluded: tuple[str, ...] = ()
    terminated: Finish | None = None  # by Slurm, a person, or the time limit
    agents_left: bool = False
    time_is_short: bool = False
    goes_on: bool = False  # elsewhere: the last word is not ours
    ends_at: float = float("inf")  # by the clock, if nobody else holds the time limit
    due: dict[Callable[[], None], float] = field(default_factory=dict)
    owner: str = field(
        default_factory=lambda: f"{os.uname().nodename} {os.getpid()} {os.urandom(8).hex()}"
    )

    def run(self) -> int:
        """Conduct the run; return the job's exit status."""
        try:
            finish = self._conduct()
        except _OverError as over:
            finish = over.finish
        except Exception:  # noqa: BLE001 - the last line of defence: the run has an end all the same
            print_trouble()
            finish = self.terminated or Finish(state=JobState.FAILED, code=1)
        if self.step is not None:
            self.step.kill()
        if finish.state is not None and not self.goes_on:
            self._write_end(finish)
            if not self.terminated:
                self.host.stay_down()
        return finish.code

    def _conduct(self) -> Finish:
        if reason := self.host.nothing_left():
            say_on_stderr(reason)
            self.host.stay_down()
            return Finish(state=None, code=0)
        self._take()
        self.paths.end.unlink(missing_ok=True)  # an earlier attempt's
        self._limit_time()
        self.due[self._register] = self.clock() + self.host.register_after_s
        while True:
            self._check()
            self._run_step()
            self._check()
            if self.code:
                self._await_scheduler()
            self._claim()
            if not self.code:
                return Finish(state=JobState.COMPLETED, code=0)
            decision = self._decide()
            self._let_go(decision.exclude)
            self._check()
            if decision.next is Next.RELAUNCH:
                self._relaunch(decision)
            elif decision.next is Next.STOP:
                return Finish(state=decision.state, code=self.code)
            else:
                return self._hand_over(decision)

    # Attempts

    def _take(self) -> None:
        """Take the next attempt; one that another job has taken is its own to end."""
        try:
            if not self.attempt:
                self.paths.attempts_dir.mkdir(mode=0o700, exist_ok=True)
            number = (self.attempt or self.paths.newest_attempt()) + 1
            while not self._with_room(partial(take_attempt, self.paths, number, self.owner)):
                if self.attempt:
                    self._leave(f"attempt {number} of this run has begun elsewhere")
                number += 1
        except OSError as error:
            say_on_stderr(f"{self.paths.attempts_dir} cannot be written to: {error}")
            raise _OverError(Finish(state=JobState.FAILED, code=1)) from error
        self.attempt = number

    def _run_step(self) -> None:
        self.agents_left = False
        again = self.step is not None
        try:
            self.step = self.host.start(self.attempt, is_relaunch=again, excluded=self.excluded)
        except OSError as error:
            say_on_stderr(f"attempt {self.attempt} cannot be started: {error}")
            raise _OverError(Finish(state=JobState.FAILED, code=127)) from error
        while (code := self.step.poll()) is None and not self.agents_left:
            self._wait(LOOK_S)
        self.code = int(NodeExit.NODE_LOST) if code is None else code
        if self.code:
            self.code = self._agreed() or self.code

    def _agreed(self) -> int:
        """Return the status that the agents agreed on: they know which rank failed first."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.paths.verdict(self.attempt).read_text(encoding="ascii"))
        return 0

    def _relaunch(self, decision: Decision) -> None:
        self.excluded = decision.exclude
        self._take()
        if decision.state is JobState.TIMEOUT:  # as if it had waited in a queue
            self._limit_time()
        elif self.time_is_short:
            write_request(self.paths.request(self.attempt), Reason.TIME_LIMIT)

    def _limit_time(self) -> None:
        self.time_is_short = False
        self.ends_at = self.clock() + self.host.time_limit_s
        self.due |= {self._warn: self.ends_at - self.plan.warning_s, self._terminate: self.ends_at}

    # What follows

    def _await_scheduler(self) -> None:
        """Wait until the scheduler answers: without it nothing can follow.

        If this node alone has lost it, others continue the run meanwhile.
        """
        is_said = False
        while not self.host.answers():
            if who := followed_by(self.paths, self.attempt, self.owner):
                self._leave(who)
            self._check()
            if not is_said:
                is_said, what = True, f"what follows attempt {self.attempt}"
                say_on_stderr(f"{what} waits: slurmctld does not answer")
            self._pause(SILENCE_S)

    def _claim(self) -> None:
        who = followed_by(self.paths, self.attempt, self.owner)
        if not who:
            with contextlib.suppress(OSError):  # a full disk is nobody's claim
                if claim(self.paths, self.attempt):
                    return
            who = followed_by(self.paths, self.attempt, self.owner)
        if who:
            self._leave(who)

    def _decide(self) -> Decision:
        try:
            decision = self.decide(self.paths.root, self.attempt, self.code, self.host.environ)
        except Exception as error:
            say_on_stderr(f"cannot decide what follows attempt {self.attempt}: {error}")
            raise _OverError(Finish(state=JobState.FAILED, code=self.code)) from error
        say_on_stderr(f"attempt {self.attempt}: {decision.next.value}: {decision.why}")
        return decision

    def _let_go(self, lost: tuple[str, ...]) -> None:
        """Leave nothing of a step; unless nodes are known to be lost it has a moment to end."""
        patience = self.clock() + (LET_GO_S if self.agents_left and not lost else 0.0)
        while self.step and self.step.poll() is None and self.clock() < patience:
            self._wait(0.2)
        if self.step:
            self.step.kill()

    def _hand_over(self, decision: Decision) -> Finish:
        """Have Slurm start the run's next job, this one again or another."""
        self.goes_on = True
        if decision.next is Next.REQUEUE and self._requeue():
            return ELSEWHERE
        if job_id := self._successor(decision.exclude):
            say_on_stderr(f"job {job_id} goes on with the run")
            self.host.stay_down()
            return Finish(state=None, code=(self.terminated or ELSEWHERE).code)
        if decision.next is Next.SUCCESSOR and not self.terminated and self._requeue():
            say_on_stderr("this job is requeued instead")
            return ELSEWHERE
        self.goes_on = False
        self._check()
        say_on_stderr(
            f"the run does not go on by itself; continue it: clusterrun resume {self.host.job_id}"
        )
        return Finish(state=decision.state, code=self.code)

    def _requeue(self) -> bool:
        refusal = "slurmctld does not answer"
        for _ in range(REQUEUE_TRIES):
            try:
                refusal = self.host.requeue()
            except SchedulerUnreachableError as error:
                refusal = error.cause or str(error)
                self._pause(SILENCE_S)  # ended meanwhile: it was heard all the same
                continue
            if not refusal:
                return True
            break
        say_on_stderr(f"Slurm does not requeue this job: {refusal}")
        return False

    def _successor(self, excluded: tuple[str, ...]) -> str:
        """Submit the next job, whatever ends this one: nobody could cancel a job not recorded."""
        try:
            with held(signal.SIGTERM):
                return self.host.submit_successor(excluded)
        except (ClusterrunError, OSError, ValueError) as error:
            say_on_stderr(f"no successor: {describe(error)}")
        finally:
            self._wait(0)
        return ""

    def _leave(self, who: str) -> NoReturn:
        self.goes_on = True
        say_on_stderr(who)
        raise _OverError(ELSEWHERE)

    # Signals and time

    def _check(self) -> None:
        """Handle what has arrived; end here if the job was ended."""
        self._wait(0)
        if self.terminated:
            code = self.terminated.code if self.host.is_witness else self.code
            raise _OverError(Finish(state=self.terminated.state, code=code or self.terminated.code))

    def _pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self._wait(left)
            self._check()

    def _wait(self, seconds: float) -> None:
        """Wait until something happens, or for a time; handle what has happened."""
        for number in self.hear(seconds):
            self._handle(number)
        for deed, at in list(self.due.items()):
            if self.clock() >= at:
                del self.due[deed]
                deed()

    def _handle(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._terminate()
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._warn()
        elif number == signal.SIGURG:
            self.agents_left = True

    def _warn(self) -> None:
        """Have the ranks save and leave: the time limit is near, or somebody requests it.

        After a node was left out, the head may be on another one; its agent looks for requests.
        """
        self.time_is_short = True
        if not self.attempt:
            return
        write_request(self.paths.request(self.attempt), Reason.TIME_LIMIT)
        with contextlib.suppress(OSError, ValueError):
            if not self.excluded:
                head = int(self.paths.head_pid(self.attempt).read_text(encoding="ascii"))
                os.kill(head, signal.SIGUSR2)

    def _terminate(self) -> None:
        """End the job, as Slurm does, a person, or the time limit."""
        if self.terminated:
            return
        if self.attempt:
            write_request(self.paths.request(self.attempt), Reason.END)
        is_over = self.host.is_over() or self.clock() >= self.ends_at
        state = JobState.TIMEOUT if is_over else JobState.CANCELLED
        self.terminated = Finish(state=state, code=int(NodeExit.CANCELLED))
        if who := followed_by(self.paths, self.attempt, self.owner):
            self.goes_on = True
            say_on_stderr(who)
        elif self.host.is_witness and not self.goes_on:
            # Slurm may kill this process before the step is gone.
            with contextlib.suppress(OSError):
                write_end(self.paths, state, self.terminated.code)
        if self.step is not None:
            self.step.end()

    def _register(self) -> None:
        """Record the job if whoever submitted it could not, and get ready to decide."""
        try:
            import clusterrun.node.recovery.conclude  # noqa: F401 - the disk may be slow once it is needed

            self.host.register()
        except Exception as error:  # noqa: BLE001 - a record is no reason to end a training
            trouble = f"{self.paths.root} could not be registered"
            say_on_stderr(f"{trouble}; clusterrun list will not show it: {error}")

    # Disks that are full

    def _with_room(self, deed: Callable[[], _Done], *, is_last: bool = False) -> _Done:
        """Do something once the disk takes it; the last deed waits even in a job that is ended."""
        until, is_said = self.clock() + ROOM_S, False
        while True:
            try:
                return deed()
            except OSError as error:
                if not self._may_pass(error) or self.clock() > until:
                    raise
                if not is_said:
                    is_said = True
                    say_on_stderr(f"{error}: waiting for room, ten minutes at most")
            if is_last:
                self._wait(ROOM_POLL_S)
            else:
                self._pause(ROOM_POLL_S)

    def _may_pass(self, error: OSError) -> bool:
        """Return whether to wait; a run that has begun survives any trouble of its disk."""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return is_full or (self.attempt > 0 and self.paths.attempts_dir.is_dir())

    def _write_end(self, finish: Finish) -> None:
        state = finish.state or JobState.FAILED
        try:
            if self.host.is_witness:
                write_end(self.paths, state, finish.code)
            else:
                self._with_room(partial(write_end, self.paths, state, finish.code), is_last=True)
        except OSError as error:
            say_on_stderr(f"cannot write {self.paths.end}: {error}")
