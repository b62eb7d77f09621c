"""The node agent: run one node's part of an attempt, until its last process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from clusterrun.node.agent.launcher import LauncherResult, NodeLauncher, launcher_of, prepare_launch
from clusterrun.node.base.causes import Cause, Ending, Failure, NodeError, NodeExit, cancelled
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import how_ended, kill_descendants, reap_adopted
from clusterrun.node.base.tasks import SharedDisk, guarded, task_error
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.forward import Forwarder, pack
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.connection import LaunchParameters, Realm, Report
from clusterrun.node.link.member import Answerer, Member, Place
from clusterrun.node.watch import hangs, interruption
from clusterrun.node.watch.notes import NodeNotes
from clusterrun.node.watch.preflight import NodeChecks, check_descriptors, node_report
from clusterrun.node.watch.ranks import Ranks
from clusterrun.node.watch.usage import Sampler
from clusterrun.shared.control_page import ControlPage
from clusterrun.shared.files import size_of
from clusterrun.shared.given import STAGED_AT
from clusterrun.shared.hostlist import fold_hostlist

TICK_S = 0.1
PROGRESS_S = 1.0  # between two reports
EVENT_FIELDS = ("type", "step", "total", "training")  # what the conductor needs of a rank's event
END_POLL_S = 0.02
GRACE_S = 3.0  # from SIGTERM to SIGKILL
WARNED_GRACE_S = 0.1  # the same if the ranks have had time to handle it
UNSAVED_GRACE_S = 0.02  # the same if no handler saves: they ignore it, or only print stacks
DRAIN_S = 8.0  # to write the rest of the log; then agents do not rest


class Agent:
    """One node's part of an attempt.

    `run` does in this order: meet the other nodes, start the ranks and watch them until the
    conductor says how the attempt ends, end what is left of them, record the ending, wait for the
    next attempt. `end` and `warn` may be called at any time. The conductor is at `place`.
    """

    def __init__(
        self,
        attempt: Attempt,
        place: Place,
        spool: Spool,
        page: ControlPage,
        forwarder: Forwarder,
        forge: Forge | None = None,
    ) -> None:
        self._attempt, self._plan, self._who = attempt, attempt.plan, attempt.who
        self._place, self._spool, self._page, self._forge = place, spool, page, forge
        self._disk, self._cancelled = SharedDisk(), asyncio.Event()
        self._journal = forwarder
        self._checks = NodeChecks(attempt.plan, is_head=attempt.who.is_first)
        self._notes = NodeNotes(attempt)
        self._ranks = Ranks(
            spool=spool,
            node=attempt.who.node,
            launched=lambda: self._launcher.ranks if self._is_running else {},
            happened=self._record_rank_event,
            failed=self._report_rank_failure,
        )
        in_step = bool(attempt.plan.cluster.scheduler.signals_ranks)
        self._own_signals = interruption.OwnSignals(page=page, pids=self._pids, is_in_step=in_step)
        self._link: Member
        self._launcher: NodeLauncher  # while it `_is_running`
        self.was_warned = self.was_signalled = self._is_stuck = False
        self._is_running = self._is_resting = False
        self.next_attempt, self.may_rest = 0, True  # 0: none follows; it may wait for one
        self.conductor_loss: Ending | None = None
        self._progress_told_at = 0.0

    @property
    def unawaited(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return [*(self._notes.gpus.pids if self._notes.gpus else []), *self._checks.pids]

    def end(self) -> None:
        """End the job on all nodes; ranks that ask when to save, or handle signals, save first."""
        self.was_signalled = True
        if self._is_resting:
            self._link.end_rest()
        elif self._is_running and (self._page.is_used or self._own_signals.are_caught):
            self._link.tell("interrupt")
        else:
            self._cancelled.set()

    def warn(self) -> None:
        """Handle a warning signal: a request was written, or the time limit is near."""
        if self._is_running:
            self._link.tell("warned", are_caught=self._own_signals.are_caught)
        self.was_warned = True  # without ranks, it is repeated once they run

    async def run(self) -> int:
        """Run this node's part of the attempt; return the job's exit status."""
        try:
            return await self._run()
        finally:
            self._disk.close()
            self._notes.close()

    async def _run(self) -> int:
        """Meet the other nodes, then train; if this node cannot take part, report why."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self._journal.say(task_error(context), tell=True)
        )
        self._journal.event("started", **self._started_fields())
        self._link = Member(
            self._who,
            Realm(paths=self._attempt.paths, attempt=self._attempt.number),
            self._place,
            float(self._plan.rendezvous_timeout_s),
            self._journal.clock,
            self._journal.record_clock,
            self._journal.record_for_conductor,
            self._answerers(),
            self._disk,
        )
        report = asyncio.ensure_future(self._report())
        try:
            parameters = await guarded(self._link.meet(report), self._raise_when_cancelled())
        except NodeError as error:
            return await self._leave_refused(error)
        finally:
            report.cancel()
        met = vars(parameters)
        # Leave out accelerate's variables: there are many.
        self._journal.event("rendezvous", **{n: v for n, v in met.items() if n != "variables"})
        if self._who.is_first:
            self._journal.say_where(parameters)
        return await self._train(parameters)

    def _started_fields(self) -> dict[str, Any]:
        """Return what the event `started` records; the first node adds facts about the job."""
        who, host = self._who, socket.gethostname()
        about: dict[str, Any] = {"node_rank": who.node_rank, "host": host, "pid": os.getpid()}
        if not who.is_first:
            return about
        for name, variable in (("job_start", "SLURM_JOB_START_TIME"), ("staged_at", STAGED_AT)):
            with contextlib.suppress(KeyError, ValueError):  # Slurm 22.05 does not set the first
                about[name] = float(os.environ[variable])
        return {**about, "nodelist": fold_hostlist(who.nodes)}

    async def _raise_when_cancelled(self) -> None:
        await self._cancelled.wait()
        raise NodeError(NodeExit.CANCELLED, "cancelled")

    async def _report(self) -> Report:
        """Return this node's report; the first node also prepares how all ranks are launched."""
        preparation = prepare_launch(self._attempt, self._spool, self._forge, self._journal)
        preparing = asyncio.ensure_future(preparation)
        checking = asyncio.ensure_future(self._checks.report())
        check_descriptors(self._attempt)
        report = await self._disk.do(partial(node_report, self._plan, self._who))
        checks = await checking
        if self._who.is_first:
            self._journal.event("checked")
        port, variables = await preparing
        return replace(report, checks=checks, port=port, variables=variables)

    async def _leave_refused(self, error: NodeError) -> int:
        """Report why this node cannot take part, and leave; return the job's exit status."""
        if not error.is_told:  # the conductor does not know it yet
            about: Any = {"code": error.code, "cause": error.cause, "message": error.message}
            self._link.report_failure(Failure(node=self._who.node, **about))
        await self._link.close()
        return self._record_ending(Ending.refused(error))

    async def _train(self, parameters: LaunchParameters) -> int:
        """Run the ranks until the attempt ends, then end what is left; return the exit status."""
        self._launcher = launcher_of(
            self._attempt, parameters, self._spool, self._forge, self._journal.say_not_forked
        )
        self._notes.launching()
        sampler = Sampler(self._attempt, self._notes.gpus, lambda: self._ranks.pids, self._journal)
        self._launcher.start()
        sampler.start()
        self._is_running = True
        if self.was_warned:  # before the launch
            self.warn()
        try:
            ending = await guarded(self._link.ending(), self._watch())
        finally:
            sampler.stop()
        noting = asyncio.ensure_future(self._notes.notes(ending, self._ranks.by_pid))
        await asyncio.sleep(0)  # let it begin: it lists the processes before they are ended
        await self._terminate()
        for note in await noting:
            self._journal.event("note", note=asdict(note))
            self._journal.say(str(note))
        self._kill()
        code = self._record_ending(ending)
        if self._link.has_lost_conductor:
            await self._link.close()
        else:
            self.next_attempt = await self._leave(ending)
        return code

    # While the ranks run

    async def _watch(self) -> None:
        """Watch ranks and launcher, and report how they ended."""
        ranks, launcher, signals = self._ranks, self._launcher, self._own_signals
        while not self._cancelled.is_set():
            ranks.update()
            signals.read_handlers()  # which signals the ranks handle
            reap_adopted(besides={*launcher.pids, *ranks.pids.values(), *signals.witnesses})
            self._tell_progress()
            # A launcher takes another second to exit after its last rank.
            if ranks.ended_well == self._plan.procs_per_node:
                self._report_launcher_end(LauncherResult(code=0, last_line=""))
                break
            if (result := launcher.result()) is not None:
                self._report_launcher_end(result)
                break
            await asyncio.sleep(TICK_S)
        # Once the attempt is settled, `guarded` ends this wait; a cancellation is a failure.
        await self._cancelled.wait()
        self._link.report_failure(cancelled(self._who.node))

    def _tell_progress(self) -> None:
        """Report every PROGRESS_S, from the first node, how far its ranks are."""
        now = time.monotonic()
        if not self._who.is_first or now < self._progress_told_at + PROGRESS_S:
            return
        self._progress_told_at = now
        self._link.tell(
            "progress",
            calls=sum(map(self._page.calls, self._page.ranks)),
            printed=sum(size_of(output.path) for output in self._spool.outputs()),
            ended_well=self._ranks.ended_well,
        )

    def _record_rank_event(self, event: dict[str, Any]) -> None:
        """Record an event of a rank; from the first node, also report it."""
        if self._who.is_first:
            # Leave out the metrics of the script: they may be too long for a message.
            self._link.tell("rank_event", event={n: event[n] for n in EVENT_FIELDS if n in event})
        if event.get("type") != "alive":  # too many: the file must show the last steps
            self._journal.record_of_rank(event)

    def _report_rank_failure(self, failure: Failure) -> None:
        """Report how a rank failed; the forge is to blame for ranks that were killed with it."""
        forge = self._forge
        if forge and forge.pids and forge.is_dead and failure.signal == signal.SIGKILL:
            text = f"the forge {forge.how_ended()}; its ranks were killed with it"
            failure = replace(failure, rank=None, cause=Cause.LAUNCHER, message=text)
        self._link.report_failure(failure)

    def _report_launcher_end(self, result: LauncherResult) -> None:
        """Report success, or why the launcher ended if no failure of a rank explains it."""
        self._ranks.update()
        self._ranks.settle_by_launcher(result.failures)
        if self._ranks.have_failed:
            return
        known, planned = len(self._spool.ranks()), self._plan.procs_per_node
        is_short = self._plan.world_contract and known < planned  # else fewer may be enough
        if result.code == 0 and not is_short:
            self._link.tell("done", has_left=self._page.has_left)  # whether a rank left as asked
            return
        message = "cannot start the launcher"
        if result.was_started:
            when = f" after {known} of {planned} ranks had started" if is_short else ""
            message = f"the launcher {how_ended(result.code)}{when}"
        failure = Failure(
            node=self._who.node,
            code=128 - result.code if result.code < 0 else result.code or 1,  # 1: ranks are missing
            signal=max(0, -result.code),
            cause=Cause.LAUNCHER,
            message=f"{message}: {result.last_line}" if result.last_line else message,
        )
        self._link.report_failure(failure)

    # What the conductor asks

    def _answerers(self) -> dict[str, Answerer]:
        """Return the functions that answer the questions of the conductor, by question."""
        return {
            "hold": partial(interruption.hold, self._page),
            "decide": partial(interruption.decide, self._page),
            "stacks": self._stacks,
            "dump": self._dump,
            "warn": self._own_signals.warn,
            "signs": self._signs,
            "look": self._look_closely,
        }

    async def _stacks(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return hangs.to_data(await hangs.places(self._ranks.pids, self._spool, self._who.node))

    async def _dump(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Have the ranks dump their flight recorders; if the attempt continues, pack the dumps."""
        dumped = await hangs.dump(self._ranks.pids, self._spool)
        if message.get("live"):
            target = self._attempt.paths.live_dumps(self._attempt.number, self._who.node)
            await self._disk.do(partial(pack, self._spool, target, is_moved=True))
        return {"dumped": dumped}

    def _signs(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return a count, without a unit, that grows while any rank makes progress."""
        calls = sum(map(self._page.calls, self._page.ranks))
        return {"signs": calls + hangs.bytes_moved(self._ranks.pids.values())}

    def _look_closely(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Find failures that ranks have reported just now; there is nothing to answer."""
        self._ranks.update(closely=True)
        return {}

    def _pids(self) -> dict[int, int]:
        """Return the processes of the ranks by local rank."""
        self._ranks.update()  # a rank may have started just now
        return {rank % self._plan.procs_per_node: pid for rank, pid in self._ranks.pids.items()}

    # At the end

    async def _terminate(self) -> None:
        """Have the ranks end within a grace time: shorter if they were warned or do not save."""
        warned = self._own_signals.warned  # pids of ranks
        grace_s = GRACE_S
        if all(map(self._page.does_not_save_on, self._page.ranks)):
            grace_s = UNSAVED_GRACE_S
        elif warned and warned.issuperset(self._ranks.pids.values()):
            grace_s = WARNED_GRACE_S
        deadline = time.monotonic() + grace_s
        self._launcher.revoke()
        if not self._is_over():
            self._ranks.terminate(besides=warned)  # these have had a signal, and may be saving
        while not self._is_over() and time.monotonic() < deadline:
            await asyncio.sleep(END_POLL_S)
        if self._forge is not None:
            await self._forge.end()

    def _kill(self) -> None:
        """Kill all but the forge, which serves the next attempt, and settle how the ranks ended."""
        left = kill_descendants(self.unawaited, spared=[self._forge.pid] if self._forge else ())
        result = self._launcher.result()
        self._ranks.update()  # what the ranks themselves reported counts first
        self._ranks.settle_by_launcher(result.failures if result else [])  # for ends it has missed
        self._ranks.close()
        for text in self._spool.unlock():  # removes locks of ranks that died while compiling
            self._journal.say(text)
        if left:
            self._is_stuck = True
            text = f"processes {left} cannot be killed; they may be blocked in the kernel"
            self._journal.say(text, tell=True)

    def _is_over(self) -> bool:
        """Return whether no rank is left; the launcher may still be running."""
        self._ranks.update()
        return self._launcher.is_over or self._ranks.all_ended(self._plan.procs_per_node)

    def _record_ending(self, ending: Ending) -> int:
        """Record the ending; return its code. Without a conductor, also report it to the user."""
        failure, is_orphaned = ending.failure, self._link.has_lost_conductor
        self.conductor_loss = ending if is_orphaned else None
        if failure is not None and (failure.node == self._who.node or is_orphaned):
            data = asdict(failure)
            self._journal.event("failed", **{"ts": data.pop("at"), **data})
        self._journal.end(ending.code, ending.reason)
        if ending.code:
            reason = " ".join(ending.reason.split())
            self._journal.say(reason, tell=is_orphaned, is_error=ending.cause.is_failure)
        return ending.code

    async def _leave(self, ending: Ending) -> int:
        """Write the rest of the log and wait for the next attempt; return its number, 0 to exit."""
        self._is_running, self._is_resting, self.was_warned = False, True, False
        self._link.tell("done", has_left=self._page.has_left)
        is_drained = await asyncio.to_thread(self._journal.finish, DRAIN_S)
        can_rest = is_drained and self.may_rest and ending.cause.is_failure
        # Over ssh, each attempt chooses its hosts anew.
        if self._is_stuck or self.was_signalled or self._plan.cluster.scheduler.has_hosts:
            can_rest = False
        following = await self._link.rest(is_well=can_rest)
        await self._link.close()
        return 0 if self.was_signalled else following
