"""One node of a smoke job, as a process: check this node alone, then with those that are present.

A node that hangs holds up no other: the head meets without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Final

from clusterrun.health import reports
from clusterrun.health.examine import examine
from clusterrun.health.facts import facts
from clusterrun.health.gpu_answer import LONG_S, gpu_facts
from clusterrun.health.node import Needs, all_looks
from clusterrun.health.reports import GroupReport, NodeReport
from clusterrun.health.site import site_verdict
from clusterrun.launch.plan import Plan
from clusterrun.node.agent.preparation import attempt_ports
from clusterrun.node.base.causes import Ending, NodeError, NodeExit
from clusterrun.node.base.facts import interface_of
from clusterrun.node.base.identity import Attempt, identity
from clusterrun.node.base.processes import adopt_orphans, kill_descendants
from clusterrun.node.base.report import LaunchParameters, Report
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.base.tasks import SharedDisk, guarded
from clusterrun.node.link.clock import Clock
from clusterrun.node.link.handshake import Realm
from clusterrun.node.link.head import Head
from clusterrun.node.link.member import Member
from clusterrun.node.smoke.group import gather
from clusterrun.node.smoke.part import NodePart
from clusterrun.node.smoke.probes import Probes
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan
from clusterrun.shared.finding import Finding, fail, skip

CHECKS_S: Final = 4.0
SITE_S: Final = 10.0
MEET_S, MEET_NODE_S = 6.0, 0.03  # for the others to join, and more for each node
START_MOST_S: Final = 60.0  # the longest start that is taken into account
LATE_S: Final = 60.0  # the head may start so much later than a member
LOOK_S: Final = 1.0
TRIED_S: Final = 3.0  # to reach the head; a node that tried for less came late
LIMIT_S: Final = 240.0  # longer than all that the head waits for, one after the other


def run_smoke(run_dir: Path, number: int) -> int:
    """Check this node and its group; files hold what is found. Return the exit status."""
    adopt_orphans()
    paths = RunPaths(root=run_dir)
    try:
        plan = read_plan(paths)
        who = identity(os.environ, plan.nodes)
        attempt = Attempt(plan=plan, paths=paths, number=number, who=who)
        asyncio.run(asyncio.wait_for(_run(attempt), LIMIT_S + len(who.nodes) * MEET_NODE_S))
    except asyncio.TimeoutError:
        say_on_stderr(f"{socket.gethostname()}: the checks did not end in time")
        return 1
    except (OSError, ValueError, NodeError) as error:
        say_on_stderr(f"{socket.gethostname()}: {error}")
        return 1
    finally:
        kill_descendants()
    return 0


async def _run(attempt: Attempt) -> None:
    probes = Probes(attempt.plan, attempt.paths.root)
    try:
        await _examine(attempt, probes)
    finally:
        await probes.end()


async def _examine(attempt: Attempt, probes: Probes) -> None:
    root, disk = attempt.paths.root, SharedDisk()
    verdict = asyncio.ensure_future(asyncio.to_thread(_of_site, attempt.plan))  # may take its time
    report = await disk.do(partial(_alone, attempt))
    await disk.do(partial(reports.write_node, root, report))
    await probes.start()  # no earlier: they use the GPUs
    part = NodePart(attempt, probes, disk)
    meet = _lead if attempt.who.is_head else _follow
    meeting = asyncio.ensure_future(meet(attempt, part, disk))
    try:
        checks = (*report.checks, *await verdict)
        report = dataclasses.replace(report, checks=checks, computed=await probes.computed())
        await disk.do(partial(reports.write_node, root, report))
        if apart := await meeting:
            report = dataclasses.replace(report, checks=(*report.checks, apart))
            await disk.do(partial(reports.write_node, root, report))
    finally:
        meeting.cancel()


def _of_site(plan: Plan) -> list[Finding]:
    return [site_verdict(plan.health_command, SITE_S)] if plan.health_command else []


def _alone(attempt: Attempt) -> NodeReport:
    needs = Needs.of(attempt.plan, is_head=attempt.who.is_head)
    asked = needs.gpu_answer(LONG_S)
    checks = tuple(examine(all_looks(needs, asked), CHECKS_S))
    gpus = gpu_facts(asked) if asked else {}
    return NodeReport(node=attempt.who.node, checks=checks, facts=facts(gpus))


async def _lead(attempt: Attempt, part: NodePart, disk: SharedDisk) -> None:
    """Meet the nodes that are present, and have all of them measure together."""
    who, realm = attempt.who, _Realm(paths=attempt.paths, attempt=attempt.number)
    wait_s = MEET_S + len(who.nodes) * MEET_NODE_S + _started_s(attempt)
    ports = attempt_ports(attempt).link
    write = partial(reports.write_group, attempt.paths.root)
    head = Head(who, realm, ports, wait_s, _parameters, disk, waits_for_all=False)
    try:
        parameters = await head.meet(_report(attempt))
    except NodeError as error:
        await disk.do(partial(write, GroupReport(problem=error.message)))
        return
    part.interface = attempt.plan.network_interface or parameters.interface
    began = time.monotonic()
    found = await gather(head, part, parameters.address)
    took_s = time.monotonic() - began
    await disk.do(partial(write, dataclasses.replace(found, took_s=took_s)))
    head.decision.make(Ending.completed())
    await head.ending()
    await head.leave()


def _started_s(attempt: Attempt) -> float:
    """Return how long the first node needed to start: others may need twice as long."""
    try:
        began = attempt.paths.owner(attempt.number).stat().st_mtime
    except OSError:
        return 0.0
    return min(START_MOST_S, max(0.0, time.time() - began))


def _parameters(_: object, address: str) -> LaunchParameters:
    return LaunchParameters(
        address=address, port=0, interface=interface_of(address), precision="no"
    )


async def _follow(attempt: Attempt, part: NodePart, disk: SharedDisk) -> Finding | None:
    """Answer the head's questions until it ends the group; return why this node is not in it."""
    who, realm = attempt.who, _Realm(paths=attempt.paths, attempt=attempt.number)
    wait_s = MEET_S + len(who.nodes) * MEET_NODE_S + LATE_S
    ports = attempt_ports(attempt).link
    member = Member(who, realm, ports, wait_s, Clock(), part.clock_compared, part.answerers, disk)
    try:
        met = await guarded(member.meet(_report(attempt)), _others_end(attempt, disk))
    except NodeError as error:
        if error.is_told:
            return skip("net.meet", error.message)
        hint = f"try there: nc -vz {who.head_host} {ports[0]}; set network.port_range"
        text = f"it cannot reach the first node, {who.nodes[0]}: {member.last_problem}"
        return fail("net.meet", text, hint)
    part.interface = attempt.plan.network_interface or met.interface
    await member.ending()
    await member.leave()
    return None


class _Realm(Realm):
    """A group that a node that cannot take part does not end."""

    async def watch(self, disk: SharedDisk, pause_s: float) -> None:
        await asyncio.Event().wait()


async def _others_end(attempt: Attempt, disk: SharedDisk) -> None:
    """Wait until the others have measured, then raise why this node was not there."""
    began = time.monotonic()
    while (found := await disk.do(partial(reports.read_group, attempt.paths.root))) is None:
        await asyncio.sleep(LOOK_S)
    is_late = time.monotonic() - began - found.took_s < TRIED_S
    text = "it started when the others had met"
    raise NodeError(NodeExit.RENDEZVOUS_FAILED, text, is_told=is_late)


def _report(attempt: Attempt) -> Report:
    return Report(node=attempt.who.node, node_rank=attempt.who.node_rank, versions={})
