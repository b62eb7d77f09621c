"""The head's part in an attempt: how the ranks are launched, what all nodes do then, and the rest
until the next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterrun.config.choices import Launcher, Preflight
from clusterrun.errors import ClusterrunError
from clusterrun.health.compare import differing, findings
from clusterrun.node.agent.answers import NodeAnswers
from clusterrun.node.agent.journal import Journal
from clusterrun.node.agent.launcher import NOT_FORKED
from clusterrun.node.agent.preparation import (
    decided_parameters,
    host_store,
    is_store_used,
    launch_variables,
    prepare_run_dir,
)
from clusterrun.node.base.causes import Cause, NodeError, NodeExit, lost_node
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.report import LaunchParameters, Report
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forge.launcher_variables import Variables
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.head import Head
from clusterrun.node.recovery.account import Account
from clusterrun.node.recovery.rules import may_be_shared
from clusterrun.node.watch import stacks
from clusterrun.node.watch.own_signals import named_signals
from clusterrun.rundir.claims import pass_on, passed_on
from clusterrun.shared import files, wording
from clusterrun.shared.files import write_whole
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import named, parse_hostlist

if TYPE_CHECKING:  # imported once the ranks start
    from clusterrun.node.watch.hangs import HangWatch
    from clusterrun.node.watch.interruption import Interruption
    from clusterrun.node.watch.looks import Looks

LOOK_S = 1.0
WORD_LOOK_S = 0.02
WORD_S = 60.0  # for the conductor to decide: a silent scheduler or a full disk delays it


class Leader:
    """The head's decisions: `prepare` and `decide` while the nodes meet, then `watch`."""

    def __init__(
        self,
        attempt: Attempt,
        spool: Spool,
        forge: Forge | None,
        disk: SharedDisk,
        journal: Journal,
        answers: NodeAnswers,
        account: Account,
    ) -> None:
        self._attempt, self._plan, self._spool, self._forge = attempt, attempt.plan, spool, forge
        self._disk, self._journal, self._answers, self._account = disk, journal, answers, account
        self._variables, self._store_port = Variables(), 0
        self._node = attempt.who.node
        self.interruption: Interruption | None = None
        self._hangs: HangWatch | None = None

    # While the nodes meet

    async def prepare(self) -> None:
        """Prepare the launch while the other nodes join."""
        asked = asyncio.ensure_future(self._ask_accelerate())
        try:
            await self._disk.do(partial(prepare_run_dir, self._attempt))
        except OSError as error:  # log readers work without it
            world = self._attempt.paths.world(self._attempt.number)
            self._journal.say(f"cannot write {world}: {error}")
        await asked

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
            self._journal.event("forge", problem=why)
        if why and self._plan.launcher is not Launcher.ACCELERATE:
            self._journal.say_not_forked(f"{NOT_FORKED.format('by accelerate launch')}: {why}")

    def decide(self, reports: Sequence[Report], address: str) -> LaunchParameters:
        """Decide how to launch. Raises NodeError if a node may not take part."""
        self._account.unfit = tuple(  # all nodes share the run directory
            report.node
            for report in reports
            if any(
                each.severity is Severity.FAIL and not each.id.startswith("path.")
                for each in report.checks
            )
        )
        found = findings({report.node: report.checks for report in reports})
        failed = [each for each in found if each.severity is Severity.FAIL]
        differences = differing({report.node: report.facts for report in reports})
        for each in (*found, *differences):
            self._journal.say(f"preflight: {each.severity.value}: {each}", tell=False)
        for each in failed:
            say_on_stderr(f"preflight: {each}")
        if failed:
            self._journal.event("preflight", findings=[each.to_data() for each in failed])
        if failed and self._plan.preflight is Preflight.ENFORCE:
            names = ", ".join(f"{each.id} on {named(each.nodes)}" for each in failed)
            text = f"preflight failed: {names}"
            raise NodeError(NodeExit.NODE_UNFIT, text, cause=Cause.PREFLIGHT)
        decided = decided_parameters(self._attempt, reports, address, self._store_port)
        return replace(decided, variables=self._variables or decided.variables)

    # While the ranks run

    def watch(self, head: Head, tasks: Tasks, cancel: Callable[[], None]) -> None:
        """Watch all nodes for interruptions and hangs; `cancel` ends the attempt."""
        from clusterrun.node.watch.hangs import HangWatch
        from clusterrun.node.watch.interruption import Interruption
        from clusterrun.node.watch.looks import Looks

        plan, answers = self._plan, self._answers
        head.decision.is_open = lambda ending, reports: may_be_shared(
            plan, ending.alike, reports, self._account.checkpoint
        )
        head.look = answers.look_closely
        self.interruption = Interruption(
            request=self._attempt.paths.request(self._attempt.number),
            page=answers.page,
            leader=head,
            warning_s=plan.warning_s,
            happened=self._journal.event,
            say=self._journal.say,
            cancel=cancel,
            has_saved=lambda: self._account.checkpoint is not None,
            is_through=lambda: self._account.is_through,
            disk=self._disk,
            own=answers.own,
            named=named_signals(plan.directive("signal") or ""),
            end_s=float("inf") if plan.cluster.scheduler.has_queue else plan.warning_s,
        )
        self._hangs = HangWatch(
            floor_s=plan.hang_timeout_s,
            node=self._node,
            spool=self._spool,
            page=answers.page,
            questions=head.questions,
            own_places=answers.places,
            own_signs=answers.signs,
            failed=head.report_failure,
            keep=partial(self._keep_evidence, head),
        )
        looks = Looks(
            directory=self._attempt.paths.attempt(self._attempt.number),
            nodes=self._attempt.who.nodes,
            questions=head.questions,
            own_places=answers.places,
            own_dumps=partial(answers.dumped, is_live=True),
            disk=self._disk,
        )
        tasks.start(self._watch_run(head, self.interruption, looks))
        tasks.start(self._watch_progress(head, self._hangs))
        if plan.world_contract and plan.world_size > 1:
            tasks.start(self._watch_joins(head))

    def heard(self, event: dict[str, Any]) -> None:
        """Take an event of a rank of this node."""
        if event.get("type") == "checkpoint" and self.interruption is not None:
            self.interruption.saved()
        if self._hangs is not None:
            self._hangs.heard(event)

    async def _watch_run(self, head: Head, interruption: Interruption, looks: Looks) -> None:
        """Watch for requests and for a later attempt on other nodes.

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
        head.report_failure(lost_node(self._node, text))

    async def _watch_progress(self, head: Head, hangs: HangWatch) -> None:
        """Watch for hangs, and for ranks that keep running after others ended."""
        while True:
            hangs.look()
            ranks = self._answers.ranks
            if head.has_leavers or (ranks and ranks.ended_well):
                hangs.leaving()
            await asyncio.sleep(LOOK_S)

    async def _watch_joins(self, head: Head) -> None:
        """Report if no rank has joined a process group after two minutes."""
        from clusterrun.node.watch.hangs import unjoined

        found = await unjoined(head.questions, self._answers.joins)
        if found is not None:
            self._journal.event("unjoined", running=found.running, waiting=found.waiting)
            self._journal.say(found.text(self._plan.world_size))
            self._journal.say(f"hint: {found.hint}")

    async def _keep_evidence(self, head: Head, found: list[stacks.RankPlace]) -> None:
        """Record where all ranks are, before they are ended because of a hang."""
        path = self._attempt.paths.stacks(self._attempt.number)
        written = self._disk.do(partial(write_whole, path, json.dumps(stacks.to_data(found))))
        await asyncio.gather(self._answers.dumped(is_live=False), head.questions.ask("dump"))
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(written, stacks.DUMP_S)

    def say_where(self, parameters: LaunchParameters) -> None:
        """Log where the ranks meet."""
        ranks = wording.count(self._plan.procs_per_node, "rank")
        world = f"{wording.count(self._plan.nodes, 'node')} x {ranks}"
        where = f"{parameters.address}:{parameters.port}"
        over = f" over {parameters.interface}" if parameters.interface else ""
        text = f"{world}, rendezvous at {where}{over}, precision {parameters.precision}"
        self._journal.say(text, tell=False)


async def rest(head: Head, attempt: Attempt, disk: SharedDisk, is_over: Callable[[], bool]) -> int:
    """Have all agents rest; return the number of the next attempt, 0 if they leave.

    The conductor decides meanwhile. It and the head are on one machine, so that each sees at once
    what the other writes. Nothing of an attempt is left while its agents rest.
    """
    pid = conductor_pid(attempt, os.environ)
    if not pid or not await head.all_rest():
        return 0
    following = 0
    with contextlib.suppress(OSError):
        await disk.do(partial(files.create, attempt.paths.rests(attempt.number)))
        os.kill(pid, signal.SIGURG)
        following = await _word(head, attempt, disk, is_over)
    if not head.is_whole or is_over():
        return 0  # a conductor that passed the attempt on starts it in another step
    if following:
        head.send_again(following)
    return following


async def _word(head: Head, attempt: Attempt, disk: SharedDisk, is_over: Callable[[], bool]) -> int:
    """Wait for what the conductor decides; if it takes too long, leave. Raises OSError."""
    until = time.monotonic() + WORD_S
    while time.monotonic() < until and head.is_whole and not is_over():
        found = await disk.do(partial(passed_on, attempt.paths, attempt.number))
        if found is not None:
            return found
        await asyncio.sleep(WORD_LOOK_S)
    return await disk.do(partial(pass_on, attempt.paths, attempt.number, 0))


def conductor_pid(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Return the conductor's pid if it is on this machine, else 0.

    If the job's first node is left out, or in a container, another process may have this number.
    """
    pid, who = env.get("CLUSTERRUN_BATCH_PID", ""), attempt.who
    with contextlib.suppress(OSError, ClusterrunError):
        nodes = [who.node] if who.is_local else parse_hostlist(env.get("SLURM_JOB_NODELIST", ""))
        words = os.fsdecode(Path("/proc", pid, "cmdline").read_bytes()).split("\0")
        is_beside = nodes[0] == who.node and attempt.paths.root in map(Path, words)
        return int(pid) if pid.isdigit() and is_beside else 0
    return 0
