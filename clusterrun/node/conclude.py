"""Conclude an attempt: what `outcome.json` says of it, and what the batch shell does next."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterrun import shell
from clusterrun.errors import ClusterrunError
from clusterrun.hostlist import parse_hostlist
from clusterrun.node.endings import Cause
from clusterrun.node.recovery import Decision, Ground, decide
from clusterrun.outcome import Next, Outcome
from clusterrun.paths import RunPaths
from clusterrun.planning.plan import Plan
from clusterrun.spec import Cluster

PROBE_S = 15.0


def conclude(run_dir: Path, number: int, code: int, env: Mapping[str, str]) -> Decision:
    """Decide what follows an attempt that ended with a status, and write it down.

    Raises OSError or ValueError where the run's files can't be read.
    """
    paths = RunPaths(root=run_dir)
    plan = _plan(paths)
    before = past(paths, number)
    history = [*before, _ended(paths, number, code, env, plan, before)]
    decision = decide(history, _ground(plan, env))
    outcome = dataclasses.replace(
        history[-1], next=decision.next, why=decision.why, exclude=decision.exclude
    )
    write_outcome(paths, outcome)
    return decision


def past(paths: RunPaths, number: int) -> list[Outcome]:
    """Read the outcomes of the attempts before one, oldest first; of those that left one.

    Those before a person resumed the run count no more.
    """
    resumed = [n for n in range(1, number) if paths.earlier_end(n).exists()]
    first = max(resumed, default=0) + 1
    return [outcome for n in range(first, number) if (outcome := _read(paths, n))]


def write_outcome(paths: RunPaths, outcome: Outcome) -> None:
    """Write outcome.json whole, readable by its owner only."""
    path = paths.outcome(outcome.attempt)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(outcome.to_json())
    temporary.rename(path)


def _read(paths: RunPaths, number: int) -> Outcome | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Outcome.from_json(paths.outcome(number).read_text())
    return None


def _ended(paths: RunPaths, number: int, code: int, env: Mapping[str, str]) -> Outcome:
    """Read the agents' outcome, or say what can be said where they left none."""
    before = past(paths, number)
    kept = before[-1].exclude if before and before[-1].next is Next.RELAUNCH else ()
    found = _read(paths, number)
    if found is not None:
        return dataclasses.replace(_unless_interrupted(paths, found), exclude=kept)
    steps = list(_numbers(paths, number))
    checkpoints = [step for kind, step in steps if kind == "checkpoint"]
    checkpoints += [o.checkpoint for o in before if o.checkpoint is not None]
    return Outcome(
        attempt=number,
        job_id=env.get("SLURM_JOB_ID") or env.get("CLUSTERRUN_LOCAL_JOB_ID", ""),
        started_at=paths.attempt(number).stat().st_mtime,
        ended_at=time.time(),
        nodes=_world(paths, number),
        code=code,
        cause=Cause.NODE_LOST.value,
        reason=f"the agents left without a word, with status {code}",
        node=next(iter(_world(paths, number)), None),
        step=max((step for kind, step in steps if kind == "step"), default=None),
        checkpoint=max(checkpoints, default=None),
        exclude=kept,
    )


def _unless_interrupted(paths: RunPaths, found: Outcome) -> Outcome:
    """Blame the interruption for ranks that were killed since they did not leave in time."""
    with contextlib.suppress(OSError):
        request = paths.request(found.attempt).read_text().strip()
        is_killed = found.cause in (Cause.SIGNAL.value, Cause.CANCELLED.value)
        if is_killed and request in ("time-limit", "preempt"):
            why = "the time limit" if request == "time-limit" else "preempted"
            return dataclasses.replace(found, cause=Cause.INTERRUPTED.value, reason=why)
    return found


def _numbers(paths: RunPaths, number: int) -> Iterator[tuple[str, int]]:
    """Yield the steps and checkpoints that the nodes wrote down of one attempt."""
    for path in paths.events_dir.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                event = _event(line)
                if event.get("attempt") == number and isinstance(event.get("step"), int):
                    yield str(event.get("type")), event["step"]


def _event(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict):
            return event
    return {}


def _world(paths: RunPaths, number: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return tuple(json.loads(paths.world(number).read_text())["nodes"])
    return ()


def _ground(plan: Plan, env: Mapping[str, str]) -> Ground:
    if plan.cluster is Cluster.LOCAL:
        nodes = tuple(f"local{rank}" for rank in range(plan.nodes))
        return Ground(plan=plan, allocated=nodes, is_reachable=lambda node: True)
    try:
        allocated = tuple(parse_hostlist(env.get("SLURM_JOB_NODELIST", "")))
    except ClusterrunError:
        allocated = ()
    return Ground(plan=plan, allocated=allocated, is_reachable=_answers)


def _answers(node: str) -> bool:
    """Ask a node of this job for a sign of life, through Slurm."""
    argv = ["srun", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--input=none"]
    try:
        done = shell.run([*argv, "--quiet", "true"], timeout_s=PROBE_S, tries=1)
    except ClusterrunError:
        return False
    return done.rc == 0
