"""Run a job from attempt to attempt: one loop for Slurm and for this machine.

The conductor takes an attempt, starts its step, handles signals and requests, and asks the rule
book what follows. Then it relaunches, requeues, submits a successor, or writes end.json.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from clusterrun.errors import ClusterrunError, Exit, NodeExit, SchedulerUnreachableError, describe
from clusterrun.launch.plan import Plan
from clusterrun.node.base.stderr import print_trouble, say_on_stderr
from clusterrun.node.conductor.agents import Agents, AgentsState
from clusterrun.node.conductor.host import Host, Step
from clusterrun.rundir.attempt import followed_by, take_attempt
from clusterrun.rundir.end import Reason, read_request, write_end, write_request
from clusterrun.rundir.outcome import Next
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState

if TYPE_CHECKING:
    from clusterrun.node.recovery.rules import Decision

LOOK_S = 0.5  # between two polls of the step
ROOM_S, ROOM_POLL_S = 600.0, 5.0  # how long to wait for space on a disk
SILENCE_S = 5.0  # between two calls of a scheduler that does not answer
REQUEUE_TRIES = 6
LOAD_S = 5.0  # into the job, when its ranks import what they need
RELEASE_S = 3.0  # for a step to end after its agents have exited

_Result = TypeVar("_Result")


class Finish(NamedTuple):
    """How this job ends; if the state is None, the run continues elsewhere."""

    state: JobState | None
    code: int


ELSEWHERE = Finish(state=None, code=int(NodeExit.INTERRUPTED))


class _OverError(Exception):
    """Raised with a `Finish` to end the job now."""


@dataclass(kw_only=True)
class Conductor:
    """One job of a run; `hear` returns new signals, or [] early when the `agents` change state."""

    paths: RunPaths
    plan: Plan
    host: Host
    hear: Callable[[float], list[int]]
    agents: Agents
    clock: Callable[[], float] = time.monotonic

    attempt: int = 0
    step: Step | None = None
    code: int = 0
    excluded: tuple[str, ...] = ()
    terminated: Finish | None = None  # by Slurm, a person, or the time limit
    agents_rest: bool = False  # they wait for the next attempt, or have taken it
    time_is_short: bool = False
    continues_elsewhere: bool = False
    ends_at: float = float("inf")  # by `clock`, if only the conductor enforces the time limit
    due: dict[Callable[[], None], float] = field(default_factory=dict)  # when to call, by `clock`
    owner: str = field(
        default_factory=lambda: f"{os.uname().nodename} {os.getpid()} {os.urandom(8).hex()}"
    )

    def run(self) -> int:
        """Run attempts until the job ends; return its exit status."""
        try:
            finish = self._conduct()
        except _OverError as over:
            (finish,) = over.args
        except Exception:  # noqa: BLE001 - the run always needs an end
            print_trouble()
            finish = self.terminated or Finish(state=JobState.FAILED, code=1)
        if self.step is not None:
            self._dismiss_agents()
            self.step.kill()
        self.agents.close()
        if finish.state is not None and not self.continues_elsewhere:
            self._write_end(finish.state, finish.code)
            if not self.terminated:
                self.host.stay_down()
        return finish.code

    def _conduct(self) -> Finish:
        """Run attempt after attempt until nothing follows in this job; return how the job ends."""
        if reason := self.host.nothing_left():
            say_on_stderr(reason)
            self.host.stay_down()
            return Finish(state=None, code=0)
        if reason := self.host.refusal():
            say_on_stderr(reason)
            self._register()
            return Finish(state=JobState.FAILED, code=int(Exit.USAGE))
        self._take_attempt()
        self._limit_time()
        self.due[self._register] = self.clock() + self.host.register_after_s
        self.due[self._load_rules] = self.clock() + LOAD_S
        while True:
            self._handle_signals()
            self._run_attempt()
            self._handle_signals()
            if self.code and not self.agents_rest:  # if agents rest, no other conductor runs
                self._await_scheduler()
            self._leave_if_followed()
            if not self.code:
                self._record_suspicions()
                return Finish(state=JobState.COMPLETED, code=0)
            decision = self._decide()
            is_on_same_nodes = decision.next is Next.RELAUNCH and decision.exclude == self.excluded
            keeps_agents = self.agents_rest and is_on_same_nodes
            if not keeps_agents:
                self._release_step(at_once=bool(decision.exclude))  # a lost node may delay it
            self._handle_signals()
            if decision.next is not Next.RELAUNCH and self.host.was_requeued():
                self._leave("this job was already requeued, by its script or by a user")
            if decision.next is Next.RELAUNCH:
                self._relaunch(decision)
            elif decision.next is Next.STOP:
                return Finish(state=decision.state, code=self.code)
            else:
                return self._hand_over(decision)

    def _take_attempt(self) -> None:
        """Take the next attempt of the run; end this job if another one has taken it."""
        try:
            if not self.attempt:
                self.paths.attempts_dir.mkdir(mode=0o700, exist_ok=True)
            number = (self.attempt or self.paths.newest_attempt()) + 1
            while not self._with_room(partial(take_attempt, self.paths, number, self.owner)):
                if self.attempt:
                    self._leave(f"attempt {number} of this run has begun elsewhere")
                number += 1  # this job has no attempt yet: it may begin with any free number
        except OSError as error:
            say_on_stderr(f"cannot write to {self.paths.attempts_dir}: {error}")
            raise _OverError(Finish(state=JobState.FAILED, code=1)) from error
        self.attempt = number
        self.paths.end.unlink(missing_ok=True)  # an earlier attempt's

    def _run_attempt(self) -> None:
        """Run the attempt, in a new step unless agents that rested have begun it; set `code`."""
        needs_step = not self.agents_rest
        try:
            if self.agents_rest:
                status = self._await_step()
                needs_step = self._ended_before_attempt(status)
            if needs_step:
                self._start_step()
                status = self._await_step()
        except (OSError, ClusterrunError) as error:
            say_on_stderr(f"cannot start attempt {self.attempt}: {describe(error)}")
            raise _OverError(Finish(state=JobState.FAILED, code=127)) from error
        self.code = self._attempt_status(status)

    def _start_step(self) -> None:
        """Start a step whose agents run the attempt. Raises OSError and ClusterrunError."""
        self.agents.begin(self.attempt)
        port, is_relaunch = self.agents.port, self.step is not None
        self.step = self.host.start(
            self.attempt, port=port, is_relaunch=is_relaunch, excluded=self.excluded
        )
        self.agents.serve()

    def _await_step(self) -> int | None:
        """Wait for the step's end; return its status, or None if its agents rest or have left."""
        self.agents_rest = False
        status = None
        while self.step and (status := self.step.poll()) is None:
            self.agents_rest = self.agents.state is AgentsState.REST
            if self.agents_rest or self.agents.state is AgentsState.LEFT:
                break
            self._wait(LOOK_S)
        return status

    def _ended_before_attempt(self, status: int | None) -> bool:
        """Return whether the step of the agents that rested ended before they began the attempt."""
        if status is None or self.terminated or self.agents.have_met:
            return False
        return self.agents.finish() is None  # they have reported no end, either

    def _attempt_status(self, step_status: int | None) -> int:
        """Return the attempt's exit status; `step_status` is None if the step still runs."""
        if step_status is None:  # the agents rest, or the step waits for a lost node
            status, ending = int(NodeExit.NODE_LOST), self.agents.ending
        else:
            status, ending = step_status, self.agents.finish()
        if status == 0:
            return 0
        if ending is not None:  # the agents know which rank failed first
            return ending.code or status
        # A failed setup line leaves its status in a file; srun has that of the last task it killed.
        with contextlib.suppress(OSError, ValueError):
            return int(self.paths.status(self.attempt).read_text(encoding="ascii"))
        return status

    def _relaunch(self, decision: Decision) -> None:
        """Take the next attempt; agents that rest begin it, unless they cannot."""
        self.excluded = decision.exclude
        self._take_attempt()
        if decision.state is JobState.TIMEOUT:  # interrupted, and no queue: a new time limit
            self._limit_time()
        elif self.time_is_short:  # a warning came before: this attempt must save, too
            write_request(self.paths.request(self.attempt), Reason.TIME_LIMIT)
        self.agents_rest = self.agents_rest and self.agents.go_on(self.attempt)
        if not self.agents_rest:
            self._release_step(at_once=False)

    def _limit_time(self) -> None:
        """Set when to warn and to end the ranks, if only the conductor enforces the time limit."""
        self.time_is_short = False
        self.ends_at = self.clock() + self.host.time_limit_s
        self.due |= {self._warn: self.ends_at - self.plan.warning_s, self._terminate: self.ends_at}

    def _await_scheduler(self) -> None:
        """Wait until the scheduler answers; leave if it has started the job elsewhere meanwhile."""
        text = f"the decision after attempt {self.attempt} waits until slurmctld answers"
        is_reported = False
        while not self.host.answers():
            self._leave_if_followed()
            self._handle_signals()
            if not is_reported:
                is_reported = True
                say_on_stderr(text)
            self._pause(SILENCE_S)

    def _leave_if_followed(self) -> None:
        if why := followed_by(self.paths, self.attempt, self.owner):
            self._leave(why)

    def conclude(self) -> Decision:
        """Ask the rule book what follows the attempt. Raises OSError and ValueError."""
        from clusterrun.node.recovery.conclude import conclude

        host = self.host
        return conclude(self.paths, self.attempt, self.code, host.environ, host.unreachable)

    def _decide(self) -> Decision:
        """Return and print what follows the attempt; end the run if that cannot be decided."""
        try:
            decision = self.conclude()
        except Exception as error:
            say_on_stderr(f"cannot decide what follows attempt {self.attempt}: {error}")
            raise _OverError(Finish(state=JobState.FAILED, code=self.code)) from error
        say_on_stderr(f"attempt {self.attempt}: {decision.next.value}: {decision.why}")
        return decision

    def _record_suspicions(self) -> None:
        """Record what is suspect about a success; an error in this must not fail the run."""
        try:
            from clusterrun.node.recovery.suspicions import examine

            examine(self.paths, self.attempt)
        except Exception as error:  # noqa: BLE001 - the run has succeeded
            say_on_stderr(f"cannot examine attempt {self.attempt}: {error}")

    def _dismiss_agents(self) -> None:
        """Have the agents exit, if they rest."""
        if self.agents_rest:
            self.agents_rest = False
            self.agents.dismiss()

    def _release_step(self, *, at_once: bool) -> None:
        """Have the step end, and kill it: `at_once`, or only if it does not end soon."""
        self._dismiss_agents()
        deadline = self.clock() + (0.0 if at_once else RELEASE_S)
        while self.step and self.step.poll() is None and self.clock() < deadline:
            self._wait(0.2)
        if self.step:
            self.step.kill()

    def _hand_over(self, decision: Decision) -> Finish:
        """Have Slurm start the run's next job: this one again, or a successor."""
        from clusterrun.node.base.processes import held  # the rule book has imported it

        self.continues_elsewhere = True  # so that a SIGTERM meanwhile records no end of the run
        if decision.next is Next.REQUEUE and self._requeue():
            return ELSEWHERE
        try:
            with held(signal.SIGTERM):  # a job that is not recorded cannot be cancelled
                job_id = self.host.submit_successor(decision.exclude)
        except (ClusterrunError, OSError, ValueError) as error:
            job_id = ""
            say_on_stderr(f"cannot submit a successor: {describe(error)}")
        self._wait(0)  # handle a SIGTERM that was held back
        if job_id:
            say_on_stderr(f"job {job_id} continues the run")
            self.host.stay_down()
            return Finish(state=None, code=(self.terminated or ELSEWHERE).code)
        if decision.next is Next.SUCCESSOR and not self.terminated and self._requeue():
            say_on_stderr("this job is requeued instead")
            return ELSEWHERE
        self.continues_elsewhere = False
        self._handle_signals()  # a SIGTERM that came meanwhile ends the run after all
        hint = f"run 'clusterrun resume {self.host.job_id}'"
        say_on_stderr(f"the run does not continue automatically; {hint}")
        return Finish(state=decision.state, code=self.code)

    def _requeue(self) -> bool:
        """Have Slurm requeue this job; return whether it did."""
        refusal = ""
        for _ in range(REQUEUE_TRIES):
            try:
                refusal = self.host.requeue()
                break
            except SchedulerUnreachableError as error:
                refusal = error.cause or str(error)
                self._pause(SILENCE_S)  # raises if the requeue succeeded and ended this job
        if refusal:
            say_on_stderr(f"Slurm does not requeue this job: {refusal}")
        return not refusal

    def _leave(self, why: str) -> NoReturn:
        self.continues_elsewhere = True
        say_on_stderr(why)
        raise _OverError(ELSEWHERE)

    def _handle_signals(self) -> None:
        """Handle pending signals, and do what is due; raise _OverError if the job was ended."""
        self._wait(0)
        if self.terminated:
            # On Slurm, end.json already has this code; elsewhere, the step's own counts if not 0.
            code = self.terminated.code if self.host.records_end else self.code
            raise _OverError(Finish(state=self.terminated.state, code=code or self.terminated.code))

    def _pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self._wait(left)
            self._handle_signals()

    def _wait(self, seconds: float) -> None:
        """Wait at most `seconds` for signals; handle them, then do what is due."""
        self.host.keep_alive()
        for number in self.hear(seconds):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._terminate()
            elif number in (signal.SIGUSR1, signal.SIGUSR2):
                self._warn()
        for action, at in list(self.due.items()):
            if self.clock() >= at:
                del self.due[action]
                action()

    def _warn(self) -> None:
        """Have the ranks save and exit: the time limit is near, or a person requests it."""
        self.time_is_short = True
        if self.attempt:
            path = self.paths.request(self.attempt)  # the attempt's leader looks for it
            write_request(path, Reason.TIME_LIMIT)
            if read_request(path) is None:  # the disk is full: try again later
                self.due[self._warn] = self.clock() + ROOM_POLL_S

    def _terminate(self) -> None:
        """End the job for Slurm, a person, or the time limit."""
        if self.terminated:
            return
        if self.attempt:
            write_request(self.paths.request(self.attempt), Reason.END)
        is_over = self.host.is_over() or self.clock() >= self.ends_at
        state = JobState.TIMEOUT if is_over else JobState.CANCELLED
        self.terminated = Finish(state=state, code=int(NodeExit.CANCELLED))
        if why := followed_by(self.paths, self.attempt, self.owner):
            self.continues_elsewhere = True
            say_on_stderr(why)
        elif self.host.records_end and not self.continues_elsewhere:
            # Slurm may kill this process before the step is gone: record the end now.
            # Elsewhere, the loop records it later.
            with contextlib.suppress(OSError):
                write_end(self.paths, state, self.terminated.code)
            if self.host.was_requeued():  # Slurm ends the job to run it again
                self.continues_elsewhere = True
                self.paths.end.unlink(missing_ok=True)
        if self.step is not None:
            self.step.end()

    def _register(self) -> None:
        """Record the job if its submitter could not."""
        try:
            self.host.register()
        except Exception as error:  # noqa: BLE001 - a training needs no record
            trouble = f"cannot register {self.paths.root}"
            say_on_stderr(f"{trouble}, so 'clusterrun list' does not show this run: {error}")

    def _load_rules(self) -> None:
        """Import the rule book, once the ranks have started: the disk may be slow later."""
        try:
            from clusterrun.node.recovery import conclude, rules, suspicions  # noqa: F401

            rules.load_judge()
        except Exception as error:  # noqa: BLE001 - it is loaded when it is needed
            say_on_stderr(f"cannot load the rule book yet: {error}")

    def _with_room(self, write: Callable[[], _Result], *, is_last: bool = False) -> _Result:
        """Return `write()`; retry for ROOM_S if the disk is full. `is_last`: even after SIGTERM."""
        pause = self._wait if is_last else self._pause  # `_pause` raises after SIGTERM
        deadline, is_reported = self.clock() + ROOM_S, False
        while True:
            try:
                return write()
            except OSError as error:
                # For a run that has started, any disk error is treated as temporary.
                has_started = self.attempt > 0 and self.paths.attempts_dir.is_dir()
                is_temporary = has_started or error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not is_temporary or self.clock() > deadline:
                    raise
                if not is_reported:
                    is_reported = True
                    say_on_stderr(f"{error}; retrying for up to {ROOM_S / 60:.0f} minutes")
            pause(ROOM_POLL_S)

    def _write_end(self, state: JobState, code: int) -> None:
        """Write end.json; wait for room on the disk unless the host also records the end."""
        try:
            if self.host.records_end:
                write_end(self.paths, state, code)
            else:
                self._with_room(partial(write_end, self.paths, state, code), is_last=True)
        except OSError as error:
            say_on_stderr(f"cannot write {self.paths.end}: {error}")
