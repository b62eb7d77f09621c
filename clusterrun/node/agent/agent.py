"""The node agent: run one node's part of an attempt, until its last process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from clusterrun.node.agent.answers import NodeAnswers
from clusterrun.node.agent.journal import Journal
from clusterrun.node.agent.launcher import LauncherResult, NodeLauncher
from clusterrun.node.agent.preparation import (
    check_descriptors,
    launcher_of,
    link_place,
    node_report,
)
from clusterrun.node.base.causes import (
    Cause,
    Ending,
    Failure,
    NodeError,
    NodeExit,
    cancelled,
)
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import kill_descendants, reap_adopted
from clusterrun.node.base.report import LaunchParameters
from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.clock import Clock
from clusterrun.node.link.head import Head
from clusterrun.node.link.member import Member
from clusterrun.node.recovery.account import Account
from clusterrun.node.watch.notes import NodeNotes
from clusterrun.node.watch.preflight import NodeChecks
from clusterrun.node.watch.ranks import Ranks
from clusterrun.node.watch.usage import Sampler
from clusterrun.rundir.startup import STAGED_AT
from clusterrun.rundir.usage import Alert, Sample, alert_texts
from clusterrun.shared.control_page import ControlPage
from clusterrun.shared.hostlist import fold_hostlist

if TYPE_CHECKING:
    from clusterrun.node.agent.leader import Leader

TICK_S = 0.1
END_LOOK_S = 0.02
GRACE_S = 3.0  # from SIGTERM to SIGKILL
SHIELDED_GRACE_S = 0.1  # the same if all ranks ignore SIGTERM, or have had time to handle it
DRAIN_S = 8.0  # to write the rest of the log; then agents do not rest


class Agent:
    """One node's part of an attempt.

    `run` does in this order: meet the other nodes, start the ranks and watch them until the link
    says how the attempt ends, end what is left of them, record the ending, rest until the next
    attempt, leave the link. `end` and `warn` may be called at any time.
    """

    def __init__(
        self,
        attempt: Attempt,
        spool: Spool,
        page: ControlPage,
        forwarder: Forwarder,
        clock: Clock,
        forge: Forge | None = None,
    ) -> None:
        self._attempt, self._plan, self._who = attempt, attempt.plan, attempt.who
        self._spool, self._page, self._forge = spool, page, forge
        self._disk, self._tasks, self._cancelled = SharedDisk(), Tasks(), asyncio.Event()
        self._journal, self._account = Journal(attempt, forwarder, clock), Account(attempt)
        self._checks = NodeChecks(attempt.plan, is_head=attempt.who.is_head)
        self._notes = NodeNotes(attempt, self._checks)
        self._answers = NodeAnswers(attempt, spool, page, self._disk)
        self._leader: Leader | None = None
        if attempt.who.is_head:
            from clusterrun.node.agent.leader import Leader  # other nodes start without it

            shared = (self._disk, self._journal, self._answers, self._account)
            self._leader = Leader(attempt, spool, forge, *shared)
        self._member: Member | None = None  # once the nodes have met
        self.was_warned = self._was_signalled = self._is_resting = self._is_stuck = False
        self.next_attempt, self.may_rest = 0, True
        self.has_lost_node = self.has_lost_head = False

    @property
    def unawaited(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return self._notes.pids

    @property
    def is_orphaned(self) -> bool:
        """Return whether the head is lost, and this agent was not signalled to end."""
        return self.has_lost_head and not self._was_signalled

    def end(self) -> None:
        """End the job on all nodes, after a checkpoint if the ranks can write one."""
        self._was_signalled = True
        if self._is_resting:
            if self._member is not None:
                self._member.end_rest()
        elif self._leader and self._leader.interruption is not None:
            self._leader.interruption.ending()
        elif self._member is not None and (self._page.is_used or self._answers.own.are_caught):
            self._member.interrupt()
        else:
            self._cancelled.set()

    def warn(self) -> None:
        """Handle a warning signal: a request was written, or the time limit is near."""
        if self._leader and self._leader.interruption is not None and not self._is_resting:
            self._leader.interruption.warned()
        self.was_warned = True

    async def run(self) -> int:
        """Run this node's part of the attempt; return the job's exit status."""
        try:
            return await self._run()
        finally:
            self._disk.close()
            self._notes.close()

    async def _run(self) -> int:
        asyncio.get_running_loop().set_exception_handler(self._journal.task_failed)
        self._journal.event("started", **self._about())
        try:
            link, parameters = await guarded(self._meet(), self._raise_when_cancelled())
        except NodeError as error:
            is_apart = error.code in (NodeExit.NODE_LOST, NodeExit.RENDEZVOUS_FAILED)
            self.has_lost_head = is_apart and not self._who.is_head
            return await self._ended(Ending.refused(error), tell=not error.is_told)
        met = vars(parameters)
        self._journal.event("rendezvous", **{n: v for n, v in met.items() if n != "variables"})
        if self._leader:
            self._leader.say_where(parameters)
        return await self._train(link, parameters)

    def _about(self) -> dict[str, Any]:
        who = self._who
        host, pid = socket.gethostname(), os.getpid()
        about = {"node_rank": who.node_rank, "host": host, "pid": pid, **self._notes.missing()}
        if not who.is_head:
            return about
        for name, variable in (("job_start", "SLURM_JOB_START_TIME"), ("staged_at", STAGED_AT)):
            with contextlib.suppress(KeyError, ValueError):  # Slurm 22.05 does not set the first
                about[name] = float(os.environ[variable])
        return {**about, "nodelist": fold_hostlist(who.nodes)}

    async def _raise_when_cancelled(self) -> None:
        await self._cancelled.wait()
        raise NodeError(NodeExit.CANCELLED, "cancelled")

    async def _meet(self) -> tuple[Head | Member, LaunchParameters]:
        checking = asyncio.ensure_future(self._checks.report())
        check_descriptors(self._attempt)
        if self._leader:
            await self._disk.do(self._account.open)
        report = await self._disk.do(partial(node_report, self._plan, self._who))
        link: Head | Member
        place = link_place(self._attempt)
        if self._leader:
            link = Head(*place, self._leader.decide, self._disk, self._leader.prepare)
        else:
            clock, compared = self._journal.clock, self._journal.clock_compared
            link = Member(*place, clock, compared, self._answers.answerers(), self._disk)
        checks = await checking
        if self._leader:
            self._journal.event("checked")
        return link, await link.meet(replace(report, checks=checks, facts=self._checks.facts))

    async def _train(self, link: Head | Member, parameters: LaunchParameters) -> int:
        ranks = self._answers.ranks = Ranks(
            spool=self._spool,
            node=self._who.node,
            happened=self._rank_event,
            failed=partial(self._rank_failed, link),
        )
        if isinstance(link, Member):
            self._member = link
        elif self._leader:
            self._leader.watch(link, self._tasks, self._cancelled.set)
            if self.was_warned:
                self.warn()
        launcher = launcher_of(
            self._attempt, parameters, self._spool, self._forge, self._journal.say_not_forked
        )
        self._notes.launching()
        sampler = self._sampler()
        launcher.start()
        sampler.start()
        try:
            ending = await guarded(link.ending(), self._watch(launcher, ranks, link))
        finally:
            sampler.stop()
        self._tasks.cancel()
        noting = asyncio.ensure_future(self._notes.notes(ending, ranks.by_pid))
        await asyncio.sleep(0)  # it first lists the processes
        await self._terminate(launcher, ranks)
        for note in await noting:
            self._journal.event("note", note=asdict(note))
            self._journal.say(str(note), tell=False)
        self._kill(launcher, ranks)
        code = await self._ended(ending)
        self.next_attempt = await self._rest(link, ending)
        await link.leave()
        # srun waits for a silent node as for a lost one
        self.has_lost_node |= not isinstance(link, Member) and link.left_behind
        return code

    def _sampler(self) -> Sampler:
        loop = asyncio.get_running_loop()

        def alerted(alerts: Sequence[Alert], sample: Sample) -> None:
            for each in alerts:
                self._journal.event("alert", kind=each.kind.value, gpu=each.gpu)
            for text in alert_texts(alerts, sample):
                self._journal.say(text, tell=False)

        return Sampler(
            attempt=self._attempt,
            gpus=self._notes.gpus,
            pids=lambda: self._answers.pids,
            now_s=self._journal.now_s,
            alerted=lambda new, each: loop.call_soon_threadsafe(alerted, new, each),
            say=self._journal.forwarder.say,
        )

    # While the ranks run

    async def _watch(self, launcher: NodeLauncher, ranks: Ranks, link: Head | Member) -> None:
        """Watch ranks and launcher, and report how they ended."""
        while not self._cancelled.is_set():
            ranks.look()
            self._answers.own.look()
            reap_adopted(
                besides={*launcher.pids, *ranks.pids.values(), *self._answers.own.witnesses}
            )
            # A launcher takes another second to exit after its last rank.
            if ranks.ended_well == self._plan.procs_per_node:
                link.report_done()
                break
            result = launcher.result()
            if result is not None:
                self._launcher_ended(result, ranks, link)
                break
            await asyncio.sleep(TICK_S)
        await self._cancelled.wait()
        link.report_failure(cancelled(self._who.node))

    def _rank_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "resumed":  # it writes a file
            self._disk.do(partial(self._account.take, dict(event)))
        else:
            self._account.take(event)
        if self._leader:
            self._leader.heard(event)
        if kind == "alive":  # too many for the file, where the last steps must be found
            return
        if kind == "rank_start":
            event.setdefault("device", self._plan.device.value)
        self._journal.of_rank(event)

    def _rank_failed(self, link: Head | Member, failure: Failure) -> None:
        """Report how a rank failed; the forge is to blame for ranks that were killed with it."""
        forge = self._forge
        if forge and forge.pids and forge.is_dead and failure.signal == signal.SIGKILL:
            text = f"the forge {forge.how_ended()}; its ranks were killed with it"
            failure = replace(failure, rank=None, cause=Cause.LAUNCHER, message=text)
        link.report_failure(failure)

    def _launcher_ended(self, result: LauncherResult, ranks: Ranks, link: Head | Member) -> None:
        ranks.look()
        ranks.settle_by_launcher(result.failures)
        if ranks.have_failed:
            return
        count, planned = ranks.heard_of, self._plan.procs_per_node
        is_short = self._plan.world_contract and count < planned
        if result.code == 0 and not is_short:
            link.report_done()
            return
        when = f" after {count} of {planned} ranks had started" if is_short else ""
        number = max(0, -result.code)
        how = f"was killed by signal {number}" if number else f"exited with status {result.code}"
        ended = f"the launcher {how}{when}" if result.was_started else "cannot start the launcher"
        why = f": {result.last_line}" if result.last_line else ""
        code = 128 + number if number else result.code or 1
        about: Any = {"code": code, "signal": number, "cause": Cause.LAUNCHER}
        link.report_failure(Failure(node=self._who.node, message=f"{ended}{why}", **about))

    # At the end

    async def _terminate(self, launcher: NodeLauncher, ranks: Ranks) -> None:
        """Have the ranks end within a grace time."""
        warned = self._answers.own.warned
        have_had_time = bool(warned) and warned.issuperset(self._answers.pids.values())
        is_shielded = all(map(self._page.is_shielded, self._page.ranks))
        grace_s = SHIELDED_GRACE_S if is_shielded or have_had_time else GRACE_S
        deadline = time.monotonic() + grace_s
        launcher.revoke()
        if not self._is_over(launcher, ranks):
            ranks.terminate(besides=warned)
        while not self._is_over(launcher, ranks) and time.monotonic() < deadline:
            await asyncio.sleep(END_LOOK_S)
        if self._forge is not None:
            await self._forge.end()

    def _kill(self, launcher: NodeLauncher, ranks: Ranks) -> None:
        """Kill all descendants of this process but the forge, which serves the next attempt."""
        spared = [self._forge.pid] if self._forge else []
        left = kill_descendants(self.unawaited, spared=spared)
        result = launcher.result()
        ranks.look()
        ranks.settle_by_launcher(result.failures if result else [])
        ranks.close()
        for text in self._spool.unlock():
            self._journal.say(text, tell=False)
        if left:
            self._is_stuck = True
            self._journal.say(
                f"processes {left} cannot be killed; they may be blocked in the kernel"
            )

    def _is_over(self, launcher: NodeLauncher, ranks: Ranks) -> bool:
        """Return whether no rank is left; the launcher may still be running."""
        ranks.look()
        return launcher.is_over or ranks.all_ended(self._plan.procs_per_node)

    async def _ended(self, ending: Ending, *, tell: bool = False) -> int:
        """Record the ending; the head, or a member that lost the head, reports it to the user."""
        failure, head = ending.failure, self._who.nodes[0]
        if failure is not None:
            is_lost = failure.cause is Cause.NODE_LOST and self._who.is_head
            is_head_lost = failure.cause is Cause.NODE_LOST and failure.node == head and not is_lost
            tell = self._who.is_head or is_head_lost
            if failure.node == self._who.node or is_head_lost or is_lost:
                data = asdict(failure)
                self._journal.event("failed", **{"ts": data.pop("at"), **data})
            self.has_lost_node = is_lost
            self.has_lost_head = is_head_lost
        if tell or self._who.is_head:
            await self._disk.do(partial(self._account.close, ending))
        self._journal.event("ended", code=ending.code, reason=ending.reason)
        self._journal.forwarder.end(ending.code, ending.reason)
        if ending.code:
            reason = " ".join(ending.reason.split())
            self._journal.say(reason, tell=tell, is_error=ending.cause.is_failure)
        return ending.code

    async def _rest(self, link: Head | Member, ending: Ending) -> int:
        """Wait for the next attempt, with the log written; return its number, 0 to leave."""
        is_lost = ending.cause is Cause.NODE_LOST or self.is_orphaned
        may_rest = self.may_rest and ending.cause.is_failure
        if is_lost or not may_rest or self._plan.cluster.scheduler.has_hosts:
            return 0
        self._is_resting, self.was_warned = True, False
        link.report_done()
        is_drained = await asyncio.to_thread(self._journal.forwarder.finish, DRAIN_S)
        is_well = is_drained and not (self._is_stuck or self._was_signalled)
        following = 0
        if isinstance(link, Member):
            following = await link.rest(is_well=is_well)
        elif is_well:
            from clusterrun.node.agent.leader import rest

            following = await rest(link, self._attempt, self._disk, lambda: self._was_signalled)
        return 0 if self._was_signalled else following
