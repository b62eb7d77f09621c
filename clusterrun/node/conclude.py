"""Conclude an attempt: what `outcome.json` says of it, and what the batch shell does next."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterrun import checkpoints, files
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.hostlist import parse_hostlist
from clusterrun.node.endings import Cause
from clusterrun.node.reach import unreachable
from clusterrun.node.recovery import Decision, Ground, decide
from clusterrun.node.request import Reason
from clusterrun.node.told import Told
from clusterrun.outcome import Next, Outcome
from clusterrun.paths import RunPaths
from clusterrun.planning.plan import Plan
from clusterrun.spec import Cluster

# What a status says where the agents left no outcome, as a setup line that failed leaves none.
_CAUSES = {
    int(NodeExit.NODE_UNFIT): Cause.NODE_UNFIT,
    int(NodeExit.RENDEZVOUS_FAILED): Cause.RENDEZVOUS,
}
_KILLED = (Cause.SIGNAL.value, Cause.LAUNCHER.value, Cause.CANCELLED.value)
VANISHED = "it left no word"
_INTERRUPTIONS = {r.value: r.text for r in (Reason.TIME_LIMIT, Reason.PREEMPT)}


def conclude(run_dir: Path, number: int, code: int, env: Mapping[str, str]) -> Decision:
    """Decide what follows an attempt that ended with a status, and write it down.

    Raises OSError or ValueError where the run's files can't be read.
    """
    paths = RunPaths(root=run_dir)
    plan = _plan(paths)
    told = _told(paths, number)
    before = [_as_told(outcome, told) for outcome in past(paths, number)]
    newest = _read(paths, number) or _of_members(paths, number)
    newest = newest or _wordless(paths, number, code, env)
    newest = dataclasses.replace(
        _unless_interrupted(paths, newest, plan.cluster),
        step=told.ended.get(number) if newest.step is None else newest.step,
        checkpoint=_saved(paths, [*before, newest], told),
        exclude=before[-1].exclude if before and before[-1].next is Next.RELAUNCH else (),
    )
    ground = dataclasses.replace(
        _ground(plan, env),
        saved_before=_saved_before(paths, number),
        savers=told.savers,
        is_ending=_requested(paths, number) in _INTERRUPTIONS,
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
    return [
        _read(paths, n) or _of_members(paths, n) or _vanished(paths, n)
        for n in range(first, number)
    ]


def _vanished(paths: RunPaths, number: int) -> Outcome:
    return Outcome(
        attempt=number,
        job_id="",
        started_at=0.0,
        ended_at=0.0,
        nodes=_world(paths, number),
        code=int(NodeExit.NODE_LOST),
        cause=Cause.NODE_LOST.value,
        reason=VANISHED,
        next=Next.REQUEUE,
    )


def _first(paths: RunPaths, number: int) -> int:
    """Return the number of the first attempt since a person started or resumed the run."""
    return 1 + max((n for n in range(1, number) if paths.earlier_end(n).exists()), default=0)


def write_outcome(paths: RunPaths, outcome: Outcome) -> None:
    """Write outcome.json whole, readable by its owner only."""
    write_outcome_to(paths.outcome(outcome.attempt), outcome)


def write_outcome_to(path: Path, outcome: Outcome) -> None:
    """Write an outcome whole, readable by its owner only."""
    files.write_whole(path, outcome.to_json())


def _of_members(paths: RunPaths, number: int) -> Outcome | None:
    """Read what the other nodes found where the head has left no word."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Outcome.from_json(paths.members_outcome(number).read_text())
    return None


def _read(paths: RunPaths, number: int) -> Outcome | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Outcome.from_json(paths.outcome(number).read_text())
    return None


def _wordless(paths: RunPaths, number: int, code: int, env: Mapping[str, str]) -> Outcome:
    """Say what can be said where the agents left no outcome."""
    nodes = _world(paths, number)
    return Outcome(
        attempt=number,
        job_id=env.get("SLURM_JOB_ID") or env.get("CLUSTERRUN_LOCAL_JOB_ID", ""),
        started_at=paths.attempt(number).stat().st_mtime,
        ended_at=time.time(),
        nodes=nodes,
        code=code,
        cause=_CAUSES.get(code, Cause.LAUNCHER).value,
        reason=f"the agents left without a word, with status {code}",
        node=next(iter(nodes), None),
    )


def _unless_interrupted(paths: RunPaths, found: Outcome, cluster: Cluster) -> Outcome:
    """Blame the interruption for what was killed since it did not leave in time.

    A run that a person ends does not go on, whatever its ranks died of while they saved.
    """
    requested = _requested(paths, found.attempt)
    if requested == Reason.CANCEL.value and found.cause != Cause.INTERRUPTED.value:
        return dataclasses.replace(found, cause=Cause.CANCELLED.value)
    if found.cause not in _KILLED:
        return found
    why = _INTERRUPTIONS.get(requested)
    # Of a preemption only the agents are told; the batch shell hears of all other ends.
    if not requested and found.cause == Cause.CANCELLED.value and cluster is Cluster.SLURM:
        why = _INTERRUPTIONS[Reason.PREEMPT.value]
    if why is None:
        return found
    code = int(NodeExit.INTERRUPTED)
    return dataclasses.replace(found, code=code, cause=Cause.INTERRUPTED.value, reason=why)


def _requested(paths: RunPaths, number: int) -> str:
    """Return who interrupted an attempt, as one word; "" where nobody did."""
    with contextlib.suppress(OSError, ValueError):
        return paths.request(number).read_text().strip()
    return ""


def _saved(paths: RunPaths, history: Sequence[Outcome], told: Told) -> int | None:
    """Find the newest checkpoint, be it that no outcome tells of it: its agents may have died.

    A run that was resumed has it on disk.
    """
    known = [told.newest(history[-1].attempt), *(outcome.checkpoint for outcome in history)]
    steps = [step for step in known if step is not None]
    on_disk = None if steps else checkpoints.newest(paths.checkpoints_dir, contents=False)[0]
    return on_disk.step if on_disk else max(steps, default=None)


def _as_told(outcome: Outcome, told: Told) -> Outcome:
    """Say what was saved by the end of an attempt, told or not: the next has not saved it."""
    if outcome.checkpoint is None:
        return dataclasses.replace(outcome, checkpoint=told.newest(outcome.attempt))
    newest = max(outcome.checkpoint, told.own(outcome.attempt) or 0)
    return dataclasses.replace(outcome, checkpoint=newest)


def _saved_before(paths: RunPaths, number: int) -> int:
    """Find the newest checkpoint of the attempts that count no more; -1 where there is none."""
    earlier = [_read(paths, n) for n in range(1, _first(paths, number))]
    return max((o.checkpoint for o in earlier if o and o.checkpoint is not None), default=-1)


def _told(paths: RunPaths, number: int) -> Told:
    attempts = range(_first(paths, number), number + 1)
    heads = [nodes[0] for n in attempts if (nodes := _world(paths, n))]
    return Told.by(paths, heads, attempts)


def _world(paths: RunPaths, number: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return tuple(json.loads(paths.world(number).read_text())["nodes"])
    return ()


def _ground(plan: Plan, env: Mapping[str, str]) -> Ground:
    if plan.cluster is Cluster.LOCAL:
        nodes = tuple(f"local{rank}" for rank in range(plan.nodes))
        return Ground(plan=plan, allocated=nodes, unreachable=lambda nodes: ())
    try:
        allocated = tuple(parse_hostlist(env.get("SLURM_JOB_NODELIST", "")))
    except ClusterrunError:
        allocated = ()
    return Ground(plan=plan, allocated=allocated, unreachable=unreachable)
