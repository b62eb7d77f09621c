"""Lead one attempt: how the ranks are launched, what all nodes do then, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from clusterrun.config.choices import Preflight
from clusterrun.health.examine import differences, findings
from clusterrun.launch.plan import Plan, Precision
from clusterrun.node.base.causes import Cause, Ending, NodeError, NodeExit, lost_node
from clusterrun.node.base.stderr import print_trouble
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.conductor.agents import AgentsState
from clusterrun.node.link.connection import LaunchParameters, Realm, Report
from clusterrun.node.link.head import Head
from clusterrun.node.recovery.conclude import Account
from clusterrun.node.recovery.rules import needs_checkpoint
from clusterrun.node.watch import hangs
from clusterrun.rundir.attempt import amend_attempt, read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import fold_hosts, named

if TYPE_CHECKING:  # imported once the ranks start
    from clusterrun.node.watch.interruption import Interruption

LOOK_S = 1.0
FINISH_S = 5.0  # for what the agents of a step that has ended have reported
WORD_S = 60.0  # for the conductor to decide: a silent scheduler or a full disk delays it
JOIN_S, JOIN_NODE_S = 15.0, 0.03  # for nodes that are checked, and more for each node
START_MOST_S = 60.0  # the longest start that is taken into account


class Leader:
    """One attempt, led from now on."""

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        number: int,
        job_id: str,
        reached: Callable[[Leader, AgentsState], None],  # called when all agents rest, or have left
        tell: Callable[[str], None],  # writes a line to the job's output
    ) -> None:
        self._paths, self._plan, self._number = paths, plan, number
        self._reached, self._tell = reached, tell
        self._disk, self._tasks = SharedDisk(), Tasks()
        self._preparing: asyncio.Future[None] | None = None  # `_prepare_run_dir`
        self._account = Account(paths, number, job_id)
        realm = Realm(paths=paths, attempt=number)
        lacks = plan.is_smoke  # a check of the nodes reports those that do not join
        self.head = Head(realm, plan.nodes, self._timeout_s, self._disk, may_lack_nodes=lacks)
        self.head.heard = self._handle_report
        self.ending: Ending | None = None  # None until it has ended, and if nodes did not meet
        self._interruption: Interruption  # these two while the ranks run
        self._hangs: hangs.HangWatch
        self._is_printed = False  # a node has printed why the attempt ends
        self._have_ended_well = False  # ranks of the first node
        self._leading = asyncio.ensure_future(self._lead())

    def _timeout_s(self) -> float:
        """Return how long the first node that joins waits for others; less in a check of nodes."""
        if not self._plan.is_smoke:
            return float(self._plan.rendezvous_timeout_s)
        now = time.time()
        # A busy node may take as long again to start as the first one took.
        took_s = now - (read_attempt(self._paths, self._number).taken_at or now)
        return JOIN_S + JOIN_NODE_S * self._plan.nodes + min(max(took_s, 0.0), START_MOST_S)

    async def _lead(self) -> None:
        """Lead the attempt to its end, then let its agents rest or exit; report their state."""
        state = AgentsState.LEFT  # without a leader, agents are not awaited
        try:
            await self.head.secret()  # read it now: each agent has to prove that it knows it
            ending = await self._run()
            if ending.failure is not None and ending.cause is Cause.NODE_LOST:
                loss = asdict(ending.failure)
                self.event("failed", ts=loss.pop("at"), **loss)
            await self._record(ending)  # the step may end while the agents stop
            have_stopped = not self.head.is_launched or await self.head.stop(ending)
            self._tasks.cancel()
            await self._record(ending)  # again: the ranks may have saved since
            if ending.code and not self._is_printed:
                self._tell(self._named(" ".join(ending.reason.split())))
            is_lost = ending.cause is Cause.NODE_LOST
            can_rest = self.head.is_launched and self.head.is_whole and not is_lost
            if can_rest and ending.cause.is_failure:
                self._reached(self, AgentsState.REST)
                await self.head.until_released(WORD_S)
            if have_stopped and not is_lost and not self.head.has_lost_rest:
                state = AgentsState.EXIT
        except Exception:  # noqa: BLE001 - without a leader, the attempt has to end
            print_trouble()
            await self.head.refuse(Ending(code=1, reason="the conductor has failed"))
        finally:
            self._tasks.cancel()
            await self.head.close()
            self._disk.close()
        self._reached(self, state)

    async def abandon(self) -> None:
        """Stop leading: the agents have gone."""
        self._leading.cancel()
        await asyncio.wait([self._leading])

    async def finish(self) -> None:
        """Wait for the end of an attempt whose step has ended."""
        self.head.step_ended()
        if self.head.peers:  # else no agent has joined
            await asyncio.wait([self._leading], timeout=FINISH_S)
        else:
            self._leading.cancel()

    async def _run(self) -> Ending:
        """Have the nodes meet and launch the ranks; return how the attempt is to end."""
        try:
            await self._disk.do(self._account.open)
            reports = await self.head.meet(self._check_setup)
            if self._preparing is not None:  # a message during `meet` has started it
                await self._preparing
            self.head.check_refused()
            parameters = self._decide(reports)
        except NodeError as error:
            ending, self._is_printed = Ending.refused(error), error.is_told
            await self.head.refuse(ending)
            return ending
        self._start_watching()
        self.head.welcome(parameters)
        return await self.head.decision.wait()

    async def _check_setup(self) -> None:
        """Raise NodeError if a setup line has failed on a node, which has printed it and left."""
        path = self._paths.status(self._number)
        with contextlib.suppress(OSError, ValueError):
            code = int(await self._disk.do(partial(path.read_text, encoding="ascii")))
            text = f"a node cannot take part: it exited with status {code}"
            raise NodeError(code, text, is_told=True)

    async def _record(self, ending: Ending) -> None:
        """Record how the attempt ended, unless a node has printed why: `conclude` reads that."""
        self.ending = ending
        if not self._is_printed:
            await self._disk.do(partial(self._account.close, ending, self.head.names))

    def _named(self, text: str) -> str:
        return f"{self.head.names[0]}: {text}" if self.head.names else text

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event on the first node."""
        self.head.tell("event", name=kind, fields={"ts": round(time.time(), 6), **fields})

    def say(self, text: str) -> None:
        """Write to the first node's log and to the job's output."""
        self.head.tell("say", text=text)
        self._tell(self._named(text))

    def _decide(self, reports: Sequence[Report]) -> LaunchParameters:
        """Decide how to launch. Raises NodeError if a node may not take part."""
        if found := problems(reports):
            raise NodeError(NodeExit.NODE_UNFIT, "; ".join(found))
        self._report_preflight(reports)
        first = reports[0]
        return LaunchParameters(
            address=self.head.first_address,
            port=first.port,
            precision=decided_precision(self._plan.precision, reports),
            variables=first.variables,
        )

    def _report_preflight(self, reports: Sequence[Report]) -> None:
        """Report what preflight found. Raises NodeError if a check failed and that is enforced."""
        self._account.unfit = tuple(report.node for report in reports if _is_unfit(report))
        found = findings({report.node: report.checks for report in reports})
        failed = [finding for finding in found if finding.severity is Severity.FAIL]
        for finding in found:  # in the first node's log
            self.head.tell("say", text=f"preflight: {finding.severity.value}: {finding}")
        for finding in failed:  # in the job's output
            self._tell(f"preflight: {finding}")
        if failed:
            self.event("preflight", findings=[finding.to_data() for finding in failed])
        if failed and self._plan.preflight is Preflight.ENFORCE:
            names = ", ".join(f"{finding.id} on {named(finding.nodes)}" for finding in failed)
            text = f"preflight failed: {names}"
            raise NodeError(NodeExit.NODE_UNFIT, text, cause=Cause.PREFLIGHT)

    def _handle_report(self, kind: str, message: dict[str, Any]) -> None:
        """Handle `nodes` and `interrupt` from any agent, and other kinds from the first node's."""
        event = message.get("event")
        if kind == "nodes" and self._preparing is None:
            self._preparing = asyncio.ensure_future(self._prepare_run_dir())
        elif not self.head.is_launched:
            return
        elif kind == "rank_event" and isinstance(event, dict):
            self._handle_event(event)
        elif kind == "progress":
            self._have_ended_well |= bool(message.get("ended_well"))
            self._hangs.heard_of(calls=int(message["calls"]), printed=int(message["printed"]))
            self._interruption.is_used |= bool(message["calls"])  # of should_checkpoint()
        elif kind == "warned":
            self._interruption.handle_warning(are_caught=message.get("are_caught") is True)
        elif kind == "interrupt":
            self._interruption.handle_sigterm()

    async def _prepare_run_dir(self) -> None:
        """Record which node has which ranks, and make the checkpoint directory.

        It must exist before a node's file system caches that it does not.
        """
        paths, plan, names = self._paths, self._plan, self.head.names

        def prepare() -> None:
            paths.checkpoints_dir.mkdir(mode=0o700, exist_ok=True)
            amend_attempt(paths, self._number, nodes=names, procs_per_node=plan.procs_per_node)

        try:
            await self._disk.do(prepare)
        except OSError as error:  # log readers work without it
            self.say(f"cannot write {paths.attempt_record(self._number)}: {error}")

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Pass on an event of a rank of the first node to what depends on it."""
        kind = event.get("type")
        if kind == "resumed":  # `take` writes a file for this one
            self._disk.do(partial(self._account.take, event))
        else:
            self._account.take(event)
        if kind == "asks":  # the script has asked when to save
            self._interruption.is_used = True
        if kind == "checkpoint":
            self._interruption.saved()
        self._hangs.heard(event)

    def _start_watching(self) -> None:
        """Watch all nodes for interruptions and hangs, from now on."""
        from clusterrun.node.watch.interruption import Interruption, named_signals

        plan, head, paths = self._plan, self.head, self._paths
        # Wait for more ranks that fail at the same place: if most do, the script is at fault. This
        # delays no restart: without a checkpoint, the run stops.
        head.decision.may_wait = lambda alike, failed: (
            0 < alike <= plan.world_size / 2
            and failed < plan.world_size
            and needs_checkpoint(plan, self._account.checkpoint)
        )
        self._interruption = Interruption(
            request=paths.request(self._number),
            head=head,
            warning_s=plan.warning_s,
            happened=self.event,
            say=self.say,
            account=self._account,
            disk=self._disk,
            tasks=self._tasks,
            named=named_signals(plan.directive("signal") or ""),
            end_s=float("inf") if plan.cluster.scheduler.has_queue else plan.warning_s,
        )
        self._hangs = hangs.HangWatch(
            floor_s=plan.hang_timeout_s,
            node=head.names[0] if head.names else "",
            questions=head.questions,
            failed=head.report_failure,
            tasks=self._tasks,
            keep=self._keep_evidence,
        )
        self._tasks.start(self._watch_run())
        directory = paths.attempt(self._number)
        self._tasks.start(hangs.answer_looks(directory, head.names, head.questions, self._disk))
        self._tasks.start(self._watch_progress())

    async def _watch_run(self) -> None:
        """Watch for requests, and for a later attempt elsewhere: Slurm may have lost this node."""
        later, newest = self._number + 1, 0
        while newest < later:
            await self._interruption.check_request()
            with contextlib.suppress(OSError):  # NFS caches single names, not listings
                newest = await self._disk.do(self._paths.newest_attempt)
            await asyncio.sleep(LOOK_S)
        text = f"attempt {later} of this run has begun elsewhere"
        self.head.report_failure(lost_node(self.head.names[0] if self.head.names else "", text))

    async def _watch_progress(self) -> None:
        """Watch for hangs, and for ranks that keep running after others have ended."""
        while True:
            self._hangs.check()
            if self._have_ended_well or any(peer.is_done for peer in self.head.peers.values()):
                self._hangs.watch_leavers()
            await asyncio.sleep(LOOK_S)

    async def _keep_evidence(self, found: list[hangs.RankPlace]) -> None:
        """Record where all ranks are, and have them write dumps, before they are ended."""
        path = self._paths.stacks(self._number)
        writing = self._disk.do(partial(write_whole, path, json.dumps(hangs.to_data(found))))
        await self.head.questions.ask("dump")
        await writing  # the disk may be slow: the caller sets a time limit


def problems(reports: Sequence[Report]) -> list[str]:
    """Return the problems that keep these nodes from training together, with node names."""
    nodes_by_problem: dict[str, list[str]] = defaultdict(list)
    versions = {}
    for report in reports:
        nodes_by_problem[report.problem].append(report.node)
        versions[report.node] = {f"versions.{name}": v for name, v in report.versions.items()}
    nodes_by_problem.pop("", None)  # the nodes without a problem
    unfit = [f"{fold_hosts(nodes)}: {problem}" for problem, nodes in nodes_by_problem.items()]
    broken = [each.text for each in differences(versions) if each.severity is Severity.FAIL]
    return [*unfit, *(f"versions differ between nodes: {text}" for text in broken)]


def _is_unfit(report: Report) -> bool:
    """Return whether a check failed on this node, but for those of paths, which all nodes share."""
    failed = (each.id for each in report.checks if each.severity is Severity.FAIL)
    return any(not name.startswith("path.") for name in failed)


def decided_precision(planned: Precision, reports: Sequence[Report]) -> str:
    """Return the planned precision, else that of the first node's GPUs. Raises NodeError."""
    if planned is not Precision.HEAD:
        return str(planned.value)
    from clusterrun.estimates.gpus import has_bf16  # slow to import; asked only for GPUs

    first = reports[0]
    if not first.capabilities:
        text = "cannot read the compute capability of its GPUs to choose bf16 or fp16"
        raise NodeError(NodeExit.NODE_UNFIT, f"{first.node}: {text}; set --mixed-precision")
    if not has_bf16(min(first.capabilities)):
        return Precision.FP16.value
    able = [each.node for each in reports if each.capabilities and has_bf16(min(each.capabilities))]
    if unable := [report.node for report in reports if report.node not in able]:
        names = ", ".join(unable)
        text = f"bf16 was chosen for the first node's GPUs; the GPUs of {names} do not support it"
        raise NodeError(NodeExit.NODE_UNFIT, f"{text}; set --mixed-precision fp16")
    return Precision.BF16.value
