"""Go on with a run whose head's node is lost: its batch script, which would do so, is lost with it.

Slurm requeues such a job once it has given the node up, minutes later; a job that may lose nodes
(--no-kill) it keeps, with nobody in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusterrun import shell
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.node.conclude import conclude
from clusterrun.node.preparation import Attempt
from clusterrun.node.reach import unreachable
from clusterrun.node.recovery import Decision
from clusterrun.outcome import Next
from clusterrun.state import JobState

SUBMIT_S = 60.0
LOST = int(NodeExit.NODE_LOST)


def inherit(attempt: Attempt, say: Callable[[str], None]) -> None:
    """Do, as the node after the head's, what the batch script would: submit what follows, or end.

    This job, in which nobody could start anything, is cancelled then. Where no job may be submitted
    from here, one that Slurm keeps is requeued. `say` writes into this node's log.
    """
    who = attempt.who
    is_heir = who.node_rank == 1 and not who.is_local
    if not is_heir or who.nodes[0] not in unreachable(who.nodes[:2]):
        return
    try:
        if not _is_claimed(attempt):
            return  # the batch script is alive out there
        decision = _decision(attempt)
        say(f"attempt {attempt.number}: {decision.next.value}: {decision.why}")
        if decision.next is Next.STOP:
            _end(attempt)
        else:
            say(f"job {_successor(attempt, decision)} goes on with the run")
    except (ClusterrunError, OSError, ValueError) as error:
        if attempt.plan.spare_nodes:
            _scheduler("scontrol", "requeue", who.job_id)
        say(f"Slurm's requeue goes on with the run, nothing from here can: {error}")
    else:
        _scheduler("scancel", who.job_id)


def _is_claimed(attempt: Attempt) -> bool:
    """Take what follows in hand, unless somebody has."""
    claim = attempt.paths.followed(attempt.number)
    ours = claim.with_name(f".{claim.name}.{attempt.who.node}")
    _write(ours, f"{attempt.who.node}\n")
    try:
        os.link(ours, claim)
    except FileExistsError:
        return False
    finally:
        ours.unlink()
    return True


def _decision(attempt: Attempt) -> Decision:
    env = {**os.environ, "SLURM_JOB_NODELIST": ""}  # without its script the job's nodes are no use
    return conclude(attempt.paths.root, attempt.number, LOST, env)


def _successor(attempt: Attempt, decision: Decision) -> str:
    """Submit the next job of the run and return its id."""
    argv = [sys.executable, "-m", "clusterrun.backends", "successor", str(attempt.paths.root)]
    done = shell.run([*argv, ",".join(decision.exclude)], timeout_s=SUBMIT_S)
    if done.rc:
        raise ClusterrunError(" ".join(done.stderr.split()) or f"status {done.rc}")
    return done.stdout.strip()


def _end(attempt: Attempt) -> None:
    """Leave the last word about the run."""
    end = {
        "schema": "clusterrun.end/1",
        "state": JobState.FAILED.value,
        "exit_code": LOST,
        "ended_at": time.time(),
    }
    temporary = attempt.paths.end.with_name(f".end.json.{os.getpid()}")
    _write(temporary, json.dumps(end) + "\n")
    temporary.rename(attempt.paths.end)


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _scheduler(*argv: str) -> None:
    with contextlib.suppress(ClusterrunError):
        shell.run(argv)
