"""The node agent: run one node's part of an attempt, until its last process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from clusterrun.config.choices import Launcher, Preflight
from clusterrun.health.compare import differing, findings
from clusterrun.node.agent import rest
from clusterrun.node.agent.launcher import NOT_FORKED, LauncherResult, NodeLauncher
from clusterrun.node.agent.preparation import (
    check_descriptors,
    decided_parameters,
    failed_preflight,
    host_store,
    is_store_used,
    launch_variables,
    launcher_of,
    node_report,
    open_link,
    prepare_run_dir,
)
from clusterrun.node.base.causes import (
    Cause,
    Ending,
    Failure,
    NodeError,
    NodeExit,
    cancelled,
    lost_node,
)
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import kill_descendants, reap_adopted
from clusterrun.node.base.report import LaunchParameters, Report, unfit
from clusterrun.node.base.shared_disk import SharedDisk
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.base.tasks import Tasks, guarded
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forge.launcher_variables import Variables
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.leftovers import pack
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.clock import Clock, Offset
from clusterrun.node.link.head import Head
from clusterrun.node.link.member import Member
from clusterrun.node.link.questions import Answerer
from clusterrun.node.recovery.account import Account
from clusterrun.node.recovery.rules import may_be_shared
from clusterrun.node.watch import dumps, joins, stacks
from clusterrun.node.watch.notes import NodeNotes
from clusterrun.node.watch.own_signals import OwnSignals, named_signals
from clusterrun.node.watch.preflight import NodeChecks
from clusterrun.node.watch.ranks import Ranks
from clusterrun.node.watch.saving import Page
from clusterrun.node.watch.usage import Sampler
from clusterrun.rundir.startup import STAGED_AT
from clusterrun.rundir.usage import Alert, Sample, alert_texts
from clusterrun.shared import wording
from clusterrun.shared.control_page import Joining
from clusterrun.shared.files import write_whole
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import fold_hostlist, named

if TYPE_CHECKING:  # of the head alone: other nodes start without them
    from clusterrun.node.watch.hangs import HangWatch
    from clusterrun.node.watch.interruption import Interruption
    from clusterrun.node.watch.looks import Looks

LINE_CHARS = 1000
TICK_S = 0.1
LOOK_S = 1.0
END_LOOK_S = 0.02
GRACE_S = 3.0  # from SIGTERM to SIGKILL
SHIELDED_GRACE_S = 0.1  # the same if all ranks ignore SIGTERM, or have had time to handle it
DRAIN_S = 8.0  # to write the rest of the log; then agents do not rest


class Agent:
    """One node's part of an attempt."""

    def __init__(
        self,
        attempt: Attempt,
        spool: Spool,
        page: Page,
        forwarder: Forwarder,
        clock: Clock,
        forge: Forge | None = None,
    ) -> None:
        self._forge, self._variables, self._store_port = forge, Variables(), 0
        self._attempt, self._spool, self._forwarder = attempt, spool, forwarder
        self._clock = clock
        self._plan, self._who = attempt.plan, attempt.who
        self._cancelled = asyncio.Event()
        self._account = Account(attempt)
        self._checks = NodeChecks(attempt.plan, is_head=attempt.who.is_head)
        self._notes = NodeNotes(attempt, self._checks)
        self._page = page
        self._ranks: Ranks | None = None
        self._member: Member | None = None
        self._interruption: Interruption | None = None
        self._hangs: HangWatch | None = None
        self.was_warned = False
        self._disk, self._tasks = SharedDisk(), Tasks()
        self._was_signalled = self._is_resting = self._is_stuck = False
        self.next_attempt, self.may_rest = 0, True
        self.has_lost_node = False
        self.has_lost_head = False
        self._own = OwnSignals(
            page=page,
            pids=self._pids_by_local_rank,
            is_in_step=bool(attempt.plan.cluster.scheduler.signals_ranks),
        )

    @property
    def unawaited(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return self._notes.pids

    @property
    def is_orphaned(self) -> bool:
        """Return whether the head is lost or silent, and this agent was not signalled to end."""
        is_silent = self._member is not None and self._member.decided_alone
        return (self.has_lost_head or is_silent) and not self._was_signalled

    def end(self) -> None:
        """End the job on all nodes, after a checkpoint if the ranks can write one."""
        self._was_signalled = True
        if self._is_resting:
            if self._member is not None:
                self._member.end_rest()
        elif self._interruption is not None:
            self._interruption.ending()
        elif self._member is not None and (self._page.is_used or self._own.are_caught):
            self._member.interrupt()
        else:
            self._cancelled.set()

    def warn(self) -> None:
        """Handle a warning signal: a request was written, or the time limit is near."""
        if self._interruption is not None and not self._is_resting:
            self._interruption.warned()
        self.was_warned = True

    async def run(self) -> int:
        """Run this node's part of the attempt; return the job's exit status."""
        try:
            return await self._run()
        finally:
            self._disk.close()
            self._notes.close()

    async def _run(self) -> int:
        asyncio.get_running_loop().set_exception_handler(self._task_failed)
        self._event("started", **self._start())
        try:
            link, parameters = await guarded(self._meet(), self._raise_when_cancelled())
        except NodeError as error:
            is_apart = error.code in (NodeExit.NODE_LOST, NodeExit.RENDEZVOUS_FAILED)
            self.has_lost_head = is_apart and not self._who.is_head
            return await self._ended(Ending.refused(error), tell=not error.is_told)
        met = vars(parameters)
        self._event("rendezvous", **{n: v for n, v in met.items() if n != "variables"})
        if self._who.is_head:
            self._say_where(parameters)
        return await self._train(link, parameters)

    async def _meet(self) -> tuple[Head | Member, LaunchParameters]:
        checking = asyncio.ensure_future(self._checks.report())
        check_descriptors(self._attempt)
        if self._who.is_head:
            await self._disk.do(self._account.open)
        report = await self._disk.do(partial(node_report, self._plan, self._who))
        answerers: dict[str, Answerer] = {
            "hold": self._page.hold,
            "decide": self._page.decide,
            "stacks": self._stacks,
            "signs": self._signs,
            "dump": self._dump,
            "joins": self._joins,
            "silence": self._silence,
            "look": self._look,
            "warn": self._warn_ranks,
        }
        compared = self._clock_compared
        decide, prepare = self._decided, self._prepare
        link = open_link(
            self._attempt, self._clock, compared, answerers, self._disk, decide, prepare
        )
        checks = await checking
        if self._who.is_head:
            self._event("checked")
        return link, await link.meet(replace(report, checks=checks, facts=self._checks.facts))

    async def _train(self, link: Head | Member, parameters: LaunchParameters) -> int:
        ranks = self._ranks = Ranks(
            spool=self._spool,
            node=self._who.node,
            happened=self._rank_event,
            failed=partial(self._rank_failed, link),
        )
        if isinstance(link, Member):
            self._member = link
        else:
            self._lead(link)
        launcher = launcher_of(
            self._attempt, parameters, self._spool, self._forge, self._say_of_forge
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
            self._event("note", note=dataclasses.asdict(note))
            self._say(str(note), tell=False)
        self._kill(launcher, ranks)
        code = await self._ended(ending)
        self.next_attempt = await self._rest(link, ending)
        await link.leave()
        # srun waits for a silent node as for a lost one
        self.has_lost_node |= not isinstance(link, Member) and link.left_behind
        return code

    def _sampler(self) -> Sampler:
        loop = asyncio.get_running_loop()
        return Sampler(
            attempt=self._attempt,
            gpus=self._notes.gpus,
            pids=lambda: self._pids,
            now_s=lambda: self._clock.corrected_s(time.time()),
            alerted=lambda new, each: loop.call_soon_threadsafe(self._alerted, new, each),
            say=self._forwarder.say,
        )

    def _alerted(self, alerts: Sequence[Alert], sample: Sample) -> None:
        for each in alerts:
            self._event("alert", kind=each.kind.value, gpu=each.gpu)
        for text in alert_texts(alerts, sample):
            self._say(text, tell=False)

    # Answers to the head, and the head's own tasks

    @property
    def _pids(self) -> dict[int, int]:
        return self._ranks.pids if self._ranks else {}

    async def _places(self) -> list[stacks.RankPlace]:
        return await stacks.places(self._pids, self._spool, self._who.node)

    async def _stacks(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return stacks.to_data(await self._places())

    async def _dump(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"dumped": await self._dumped(is_live=bool(message.get("live")))}

    async def _dumped(self, *, is_live: bool) -> list[int]:
        """Have the ranks dump their flight recorders; of a running attempt, pack them now."""
        dumped = await dumps.collect(self._pids, self._spool)
        if is_live:
            target = self._attempt.paths.live_dumps(self._attempt.number, self._who.node)
            await self._disk.do(partial(pack, self._spool, target, is_moved=True))
        return dumped

    async def _keep_evidence(self, head: Head, found: list[stacks.RankPlace]) -> None:
        """Record where all ranks are, before they are ended because of a hang."""
        path = self._attempt.paths.stacks(self._attempt.number)
        written = self._disk.do(partial(write_whole, path, json.dumps(stacks.to_data(found))))
        await asyncio.gather(self._dumped(is_live=False), head.questions.ask("dump"))
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(written, dumps.ANSWER_S)

    async def _signs(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"signs": self._own_signs()}

    async def _look(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._look_closely()
        return {}

    def _look_closely(self) -> None:
        if self._ranks is not None:
            self._ranks.look(closely=True)

    def _pids_by_local_rank(self) -> dict[int, int]:
        if self._ranks is not None:
            self._ranks.look()  # a rank may have started just now
        return {rank % self._plan.procs_per_node: pid for rank, pid in self._pids.items()}

    async def _warn_ranks(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._member is not None:
            self._member.is_patient = True
        return await self._own.warn(message)

    async def _silence(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"silent_s": self._spool.silent_s()}

    def _own_signs(self) -> int:
        """Return a count, without a unit, that grows while any rank makes progress."""
        return self._page.calls() + stacks.bytes_moved(self._pids.values())

    async def _joins(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return vars(self._own_joins())

    def _own_joins(self) -> joins.Joins:
        states = self._page.joining()
        return joins.Joins(
            running=len(self._pids),
            waiting=states.count(Joining.WAITS),
            joined=states.count(Joining.JOINED),
        )

    def _lead(self, head: Head) -> None:
        """Watch all nodes for interruptions and hangs."""
        from clusterrun.node.watch.hangs import HangWatch
        from clusterrun.node.watch.interruption import Interruption
        from clusterrun.node.watch.looks import Looks

        head.decision.is_open = self._is_open
        head.look = self._look_closely
        self._interruption = Interruption(
            request=self._attempt.paths.request(self._attempt.number),
            page=self._page,
            leader=head,
            warning_s=self._plan.warning_s,
            happened=self._event,
            say=self._say,
            cancel=self._cancelled.set,
            has_saved=lambda: self._account.checkpoint is not None,
            is_through=lambda: self._account.is_through,
            disk=self._disk,
            own=self._own,
            named=named_signals(self._plan.directive("signal") or ""),
            end_s=float("inf") if self._plan.cluster.scheduler.has_queue else self._plan.warning_s,
        )
        self._hangs = HangWatch(
            floor_s=self._plan.hang_timeout_s,
            silence_s=self._plan.silence_timeout_s,
            node=self._who.node,
            spool=self._spool,
            page=self._page,
            questions=head.questions,
            own_places=self._places,
            own_signs=self._own_signs,
            failed=head.report_failure,
            keep=partial(self._keep_evidence, head),
        )
        looks = Looks(
            directory=self._attempt.paths.attempt(self._attempt.number),
            nodes=self._who.nodes,
            questions=head.questions,
            own_places=self._places,
            own_dumps=partial(self._dumped, is_live=True),
            disk=self._disk,
        )
        self._tasks.start(self._watch_run(head, self._interruption, looks))
        self._tasks.start(self._watch_progress(head, self._hangs))
        if self._plan.world_contract and self._plan.world_size > 1:
            self._tasks.start(self._watch_joins(head))
        if self.was_warned:
            self._interruption.warned()

    def _is_open(self, ending: Ending, reports: int) -> bool:
        """Return whether the ranks that have not failed could show that the script is to blame."""
        saved = self._account.checkpoint
        return may_be_shared(self._plan, alike=ending.alike, reports=reports, checkpoint=saved)

    # Before the launch

    def _start(self) -> dict[str, Any]:
        who = self._who
        host, pid = socket.gethostname(), os.getpid()
        about = {"node_rank": who.node_rank, "host": host, "pid": pid, **self._notes.missing()}
        if not who.is_head:
            return about
        # Slurm 22.05 does not set the first variable.
        times = {"job_start": _time("SLURM_JOB_START_TIME"), "staged_at": _time(STAGED_AT)}
        return {**about, "nodelist": fold_hostlist(who.nodes), **times}

    def _decided(self, reports: Sequence[Report], address: str) -> LaunchParameters:
        """Decide, as the head, how to launch. Raises NodeError if a node may not take part."""
        self._account.unfit = unfit(reports)
        found = findings({report.node: report.checks for report in reports})
        failed = [each for each in found if each.severity is Severity.FAIL]
        differences = differing({report.node: report.facts for report in reports})
        for each in (*found, *differences):
            self._forwarder.say(f"preflight: {each.severity.value}: {each}")
        for each in failed:
            say_on_stderr(f"preflight: {each}")
        if failed:
            self._event(
                "preflight",
                findings=[{**each.to_data(), "nodes": named(each.nodes)} for each in failed],
            )
        if failed and self._plan.preflight is Preflight.ENFORCE:
            raise failed_preflight(failed)
        decided = decided_parameters(self._attempt, reports, address, self._store_port)
        return replace(decided, variables=self._variables)

    async def _prepare(self) -> None:
        """Prepare the launch, as the head, while the other nodes join."""
        await asyncio.gather(self._prepare_run_dir(), self._ask_accelerate())

    async def _ask_accelerate(self) -> None:
        """Ask for the variables of the ranks, and have their store hosted meanwhile."""
        why = "no process could be forked for that"
        if self._forge is not None:
            variables = launch_variables(self._attempt, self._spool, self._forge)
            asked = asyncio.ensure_future(variables)
            await asyncio.sleep(0)  # it asks first: the store is there sooner
            if self._plan.world_size > 1:
                self._store_port = host_store(self._attempt, self._forge)
            self._variables, why = await asked
            if self._variables and is_store_used(self._variables) != bool(self._store_port):
                self._store_port = 0 if self._store_port else host_store(self._attempt, self._forge)
            self._event("forge", problem=why)
        if why and self._plan.launcher is not Launcher.ACCELERATE:
            self._say_of_forge(f"{NOT_FORKED.format('by accelerate launch')}: {why}")

    def _say_of_forge(self, text: str) -> None:
        self._say(text, tell=self._who.is_head)
        self._event("not_forked", reason=text)

    def _clock_compared(self, offset: Offset) -> None:
        self._event("clock", offset_us=offset.offset_us, rtt_us=offset.rtt_us)
        seconds = abs(offset.offset_us) / 1_000_000
        side = "ahead of" if offset.offset_us > 0 else "behind"
        text = f"this node's clock is {seconds:.3f} s {side} the head's; times are corrected"
        self._say(text, tell=False)

    async def _prepare_run_dir(self) -> None:
        try:
            await self._disk.do(partial(prepare_run_dir, self._attempt))
        except OSError as error:  # log readers work without it
            self._say(f"cannot write {self._attempt.paths.world(self._attempt.number)}: {error}")

    async def _raise_when_cancelled(self) -> None:
        await self._cancelled.wait()
        raise NodeError(NodeExit.CANCELLED, "cancelled")

    # While the ranks run

    async def _watch(self, launcher: NodeLauncher, ranks: Ranks, link: Head | Member) -> None:
        """Watch ranks and launcher, and report how they ended."""
        while not self._cancelled.is_set():
            ranks.look()
            self._own.look()
            reap_adopted(besides={*launcher.pids, *ranks.pids.values(), *self._own.witnesses})
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

    async def _watch_run(self, head: Head, interruption: Interruption, looks: Looks) -> None:
        """Watch, as the head, for requests and for a later attempt on other nodes.

        Slurm restarts a job elsewhere if it loses contact with its nodes; only one may train.
        """
        later, newest = self._attempt.number + 1, 0
        while newest < later:
            await interruption.look()
            await looks.look()
            with contextlib.suppress(OSError):  # NFS caches single names, not listings
                newest = await self._disk.do(self._attempt.paths.newest_attempt)
            await asyncio.sleep(LOOK_S)
        text = f"attempt {later} of this run has begun elsewhere"
        head.report_failure(lost_node(self._who.node, text))

    async def _watch_progress(self, head: Head, hangs: HangWatch) -> None:
        """Watch, as the head, for hangs, and for ranks that keep running after others ended."""
        while True:
            hangs.look()
            if head.has_leavers or (self._ranks and self._ranks.ended_well):
                hangs.leaving()
            await asyncio.sleep(LOOK_S)

    async def _watch_joins(self, head: Head) -> None:
        """Report, as the head, if no rank has joined a process group after two minutes."""
        found = await joins.unjoined(head.questions, self._own_joins)
        if found is not None:
            self._event("unjoined", running=found.running, waiting=found.waiting)
            self._say(found.text(self._plan.world_size))
            self._say(f"hint: {found.hint}")

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
        short = f" after {count} of {planned} ranks had started" if is_short else ""
        link.report_failure(_launcher_failure(self._who.node, result, short))

    # At the end

    async def _terminate(self, launcher: NodeLauncher, ranks: Ranks) -> None:
        """Have the ranks end within a grace time."""
        warned = self._own.warned
        have_had_time = bool(warned) and warned.issuperset(self._pids.values())
        grace_s = SHIELDED_GRACE_S if self._page.is_shielded or have_had_time else GRACE_S
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
            self._say(text, tell=False)
        if left:
            self._is_stuck = True
            self._say(f"processes {left} cannot be killed; they may be blocked in the kernel")

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
                self._event("failed", **{"ts": data.pop("at"), **data})
            self.has_lost_node = is_lost
            self.has_lost_head = is_head_lost
        if tell or self._who.is_head:
            await self._disk.do(partial(self._account.close, ending))
        self._event("ended", code=ending.code, reason=ending.reason)
        self._forwarder.end(ending.code, ending.reason)
        if ending.code:
            reason = " ".join(ending.reason.split())
            self._say(reason, tell=tell, is_error=ending.cause.is_failure)
        return ending.code

    async def _rest(self, link: Head | Member, ending: Ending) -> int:
        """Wait for the next attempt, with the log written; return its number, 0 to leave."""
        is_lost = ending.cause is Cause.NODE_LOST or self.is_orphaned
        may_rest = self.may_rest and ending.cause.is_failure
        if is_lost or not may_rest or self._plan.cluster.scheduler.has_hosts:
            return 0
        self._is_resting, self.was_warned = True, False
        link.report_done()
        is_drained = await asyncio.to_thread(self._forwarder.finish, DRAIN_S)
        is_well = is_drained and not (self._is_stuck or self._was_signalled)
        following = 0
        if isinstance(link, Member):
            following = await link.rest(is_well=is_well)
        elif is_well:
            is_over = lambda: self._was_signalled  # noqa: E731
            following = await rest.lead(link, self._attempt, self._disk, is_over)
        return 0 if self._was_signalled else following

    # Messages and events

    def _rank_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "resumed":  # it writes a file
            self._disk.do(partial(self._account.take, dict(event)))
        else:
            self._account.take(event)
        if kind == "checkpoint" and self._interruption is not None:
            self._interruption.saved()
        if self._hangs is not None:
            self._hangs.heard(event)
        if kind == "alive":  # too many for the file, where the last steps must be found
            return
        if kind == "rank_start":
            event.setdefault("device", self._plan.device.value)
        event["ts"] = round(self._clock.corrected_s(event["ts"]), 6)
        # A script's own values may have these names.
        about = {"attempt", "node", "type"}
        fields = {name: value for name, value in event.items() if name not in about}
        self._event(event["type"], **fields)

    def _task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report the error of a background task in one line instead of asyncio's traceback."""
        error = context.get("exception")
        what = f": {type(error).__name__}: {error}" if error else ""
        self._say(f"internal error: {context['message']}{what}"[:LINE_CHARS])

    def _event(self, kind: str, /, **fields: Any) -> None:
        at = round(self._clock.corrected_s(time.time()), 6)
        about = {"ts": at, "type": kind, "attempt": self._attempt.number}
        event = {**about, "node": self._who.node, **fields}
        self._forwarder.event(event)

    def _say(self, text: str, *, tell: bool = True, is_error: bool = False) -> None:
        """Write to the node's log, and with `tell` also to the job's output.

        With `is_error`, the log marks it so that readers find it among the error lines.
        """
        self._forwarder.say(f"error: {text}" if is_error else text)
        if tell:
            say_on_stderr(f"{self._who.node}: {text}")

    def _say_where(self, parameters: LaunchParameters) -> None:
        ranks = wording.count(self._plan.procs_per_node, "rank")
        world = f"{wording.count(self._plan.nodes, 'node')} x {ranks}"
        where = f"{parameters.address}:{parameters.port}"
        over = f" over {parameters.interface}" if parameters.interface else ""
        text = f"{world}, rendezvous at {where}{over}, precision {parameters.precision}"
        self._say(text, tell=False)


def _time(name: str) -> float | None:
    """Return the time in a variable; None if it has none."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(name, ""))
    return None


def _launcher_failure(node: str, result: LauncherResult, when: str) -> Failure:
    number = max(0, -result.code)
    how = f"was killed by signal {number}" if number else f"exited with status {result.code}"
    ended = f"the launcher {how}{when}" if result.was_started else "cannot start the launcher"
    why = f": {result.last_line}" if result.last_line else ""
    return Failure(
        at=time.time(),
        node=node,
        rank=None,
        code=128 + number if number else result.code or 1,
        signal=number,
        cause=Cause.LAUNCHER,
        message=f"{ended}{why}",
    )
