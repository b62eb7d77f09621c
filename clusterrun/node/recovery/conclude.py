"""Conclude an attempt: what `outcome.json` says of it, and what the batch shell does next."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterrun.config.spec import Cluster
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.launch.plan import Plan
from clusterrun.node.recovery import printed
from clusterrun.node.recovery.reach import unreachable
from clusterrun.node.recovery.rules import Decision, Ground, decide
from clusterrun.node.recovery.steps_on_disk import Told
from clusterrun.rundir.outcome import (
    Cause,
    Next,
    Outcome,
    Reason,
    read_outcome,
    read_world,
    write_outcome,
)
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.request import read_request
from clusterrun.shared import checkpoint_files
from clusterrun.shared.files import size_of
from clusterrun.shared.hostlist import parse_hostlist

# What a status says where the agents left no outcome, as a setup line that failed leaves none.
_CAUSES = {
    int(NodeExit.NODE_UNFIT): Cause.NODE_UNFIT,
    int(NodeExit.RENDEZVOUS_FAILED): Cause.RENDEZVOUS,
}
_KILLED = (Cause.SIGNAL, Cause.LAUNCHER, Cause.CANCELLED)
_INTERRUPTIONS = (Reason.TIME_LIMIT, Reason.PREEMPT)  # after which Slurm takes the nodes
EARLY_S = 120.0  # Slurm warns up to a minute early, and the ranks take their time to leave


def conclude(run_dir: Path, number: int, code: int, env: Mapping[str, str]) -> Decision:
    """Decide what follows an attempt that ended with a status, and write it down.

    Raises OSError or ValueError where the run's files can't be read.
    """
    paths = RunPaths(root=run_dir)
    plan = _plan(paths)
    told = _told(paths, number)
    before = [_as_told(outcome, told) for outcome in past(paths, number)]
    newest = read_outcome(paths, number) or _wordless(paths, number, code, env, before)
    newest = _unless_interrupted(paths, newest, plan.cluster)
    newest = dataclasses.replace(
        _unless_signalled([*before, newest], plan, env),
        printed_bytes=size_of(paths.batch_output),
        step=told.ended.get(number) if newest.step is None else newest.step,
        checkpoint=_saved(paths, [*before, newest], told),
        exclude=before[-1].exclude if before and before[-1].next is Next.RELAUNCH else (),
    )
    ground = dataclasses.replace(
        _ground(plan, env),
        saved_before=_saved_before(paths, number),
        savers=told.savers,
        is_ending=read_request(paths.request(number)) in _INTERRUPTIONS,
    )
    decision = dataclasses.replace(decide([*before, newest], ground), state=newest.state)
    outcome = dataclasses.replace(
        newest, next=decision.next, why=decision.why, exclude=decision.exclude
    )
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        write_outcome(paths, outcome)
    return decision


def _plan(paths: RunPaths) -> Plan:
    try:
        return Plan.from_json(paths.plan.read_text())
    except (TypeError, KeyError) as error:
        raise ValueError(f"{paths.plan} can't be read: {error}") from error


def past(paths: RunPaths, number: int) -> list[Outcome]:
    """Read the outcomes of the attempts before one, oldest first.

    One that left none took its batch host with it. Those before a person resumed the run count no
    more.
    """
    first = _first(paths, number)
    return [read_outcome(paths, n) or _vanished(paths, n) for n in range(first, number)]


def _vanished(paths: RunPaths, number: int) -> Outcome:
    return Outcome(
        attempt=number,
        job_id="",
        started_at=0.0,
        ended_at=0.0,
        nodes=read_world(paths, number),
        code=int(NodeExit.NODE_LOST),
        cause=Cause.VANISHED,
        reason="it left no report",
        next=Next.REQUEUE,
    )


def _first(paths: RunPaths, number: int) -> int:
    """Return the number of the first attempt since a person started or resumed the run."""
    return 1 + max((n for n in range(1, number) if paths.earlier_end(n).exists()), default=0)


def _wordless(
    paths: RunPaths, number: int, code: int, env: Mapping[str, str], before: Sequence[Outcome]
) -> Outcome:
    """Report what is known when the agents left no outcome."""
    nodes = read_world(paths, number)
    since = before[-1].printed_bytes if before else 0
    hosts = (*_allocated(env), socket.gethostname())
    message = printed.last_reason(paths.batch_output, since, hosts)
    return Outcome(
        attempt=number,
        job_id=env.get("SLURM_JOB_ID") or env.get("CLUSTERRUN_LOCAL_JOB_ID", ""),
        started_at=paths.attempt(number).stat().st_mtime,
        ended_at=time.time(),
        nodes=nodes,
        code=code,
        cause=_CAUSES.get(code, Cause.LAUNCHER),
        reason=message or f"the agents exited with status {code} and reported no reason",
        message=message,
        node=next(iter(nodes), None),
    )


def _unless_interrupted(paths: RunPaths, found: Outcome, cluster: Cluster) -> Outcome:
    """Blame the interruption for what was killed since it did not leave in time.

    A run that a person ends does not go on, whatever its ranks died of while they saved.
    """
    requested = read_request(paths.request(found.attempt))
    if requested is Reason.CANCEL and found.cause is not Cause.INTERRUPTED:
        return dataclasses.replace(found, cause=Cause.CANCELLED)
    if found.cause not in _KILLED:
        return found
    # Of a preemption only the agents are told; the batch shell hears of all other ends.
    if requested is None and found.cause is Cause.CANCELLED and cluster is Cluster.SLURM:
        requested = Reason.PREEMPT
    if requested not in _INTERRUPTIONS:
        return found
    code = int(NodeExit.INTERRUPTED)
    return _interrupted(dataclasses.replace(found, code=code), requested)


def _interrupted(found: Outcome, reason: Reason) -> Outcome:
    return dataclasses.replace(
        found, cause=Cause.INTERRUPTED, interruption=reason, reason=reason.text
    )


def _unless_signalled(history: Sequence[Outcome], plan: Plan, env: Mapping[str, str]) -> Outcome:
    """Tell a signal that somebody sent from Slurm's warning: the time that is left decides."""
    newest = history[-1]
    is_near = _left_s(history, plan, env) <= plan.warning_s + EARLY_S
    if newest.interruption is not Reason.TIME_LIMIT or is_near:
        return newest
    return _interrupted(newest, Reason.SIGNAL)


def _left_s(history: Sequence[Outcome], plan: Plan, env: Mapping[str, str]) -> float:
    """Return how much of the job's time was left when its newest attempt ended."""
    newest = history[-1]
    if env.get("SLURM_JOB_END_TIME", "").isdigit():
        return int(env["SLURM_JOB_END_TIME"]) - newest.ended_at
    if not plan.time_minutes:
        return float("inf")
    start = next(o.started_at for o in history if o.job_id == newest.job_id)
    return start + plan.time_minutes * 60 - newest.ended_at


def _saved(paths: RunPaths, history: Sequence[Outcome], told: Told) -> int | None:
    """Find the newest checkpoint, be it that no outcome tells of it: its agents may have died.

    A run that was resumed has it on disk.
    """
    known = [told.newest(history[-1].attempt), *(outcome.checkpoint for outcome in history)]
    steps = [step for step in known if step is not None]
    on_disk = None if steps else checkpoint_files.newest(paths.checkpoints_dir, contents=False)[0]
    return on_disk.step if on_disk else max(steps, default=None)


def _as_told(outcome: Outcome, told: Told) -> Outcome:
    """Say what was saved by the end of an attempt, told or not: the next has not saved it."""
    if outcome.checkpoint is None:
        return dataclasses.replace(outcome, checkpoint=told.newest(outcome.attempt))
    newest = max(outcome.checkpoint, told.own(outcome.attempt) or 0)
    return dataclasses.replace(outcome, checkpoint=newest)


def _saved_before(paths: RunPaths, number: int) -> int:
    """Find the newest checkpoint of the attempts that count no more; -1 where there is none."""
    earlier = [read_outcome(paths, n) for n in range(1, _first(paths, number))]
    return max((o.checkpoint for o in earlier if o and o.checkpoint is not None), default=-1)


def _told(paths: RunPaths, number: int) -> Told:
    attempts = range(_first(paths, number), number + 1)
    heads = [nodes[0] for n in attempts if (nodes := read_world(paths, n))]
    return Told.by(paths, heads, attempts)


def _ground(plan: Plan, env: Mapping[str, str]) -> Ground:
    if plan.cluster is Cluster.LOCAL:
        nodes = tuple(f"local{rank}" for rank in range(plan.nodes))
        return Ground(plan=plan, allocated=nodes, unreachable=lambda nodes: ())
    return Ground(plan=plan, allocated=_allocated(env), unreachable=unreachable)


def _allocated(env: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(parse_hostlist(env.get("SLURM_JOB_NODELIST", "")))
    except ClusterrunError:
        return ()
