"""Go on with a run whose head's node is lost: its batch script, which would do so, is lost with it.

Slurm requeues such a job once it has given the node up, minutes later; a job that may lose nodes
(--no-kill) it keeps, with nobody in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from clusterrun import files, shell
from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.hostlist import parse_hostlist
from clusterrun.node.conclude import conclude
from clusterrun.node.interruption import Reason
from clusterrun.node.preparation import Attempt
from clusterrun.node.reach import unreachable
from clusterrun.node.recovery import Decision
from clusterrun.outcome import Next
from clusterrun.planning.launch import module_argv
from clusterrun.state import JobState

HEIRS = 3  # nodes after the head's: more are hardly lost at once, and each would ask Slurm
SUBMIT_S = 60.0
LOST = int(NodeExit.NODE_LOST)
ENDING = (Reason.CANCEL.value, Reason.END.value)


def inherit(attempt: Attempt, say: Callable[[str], None]) -> None:
    """Do, as the next node that is left, what the batch script would: submit what follows, or end.

    This job, in which nobody could start anything, is cancelled then. Where no job may be submitted
    from here, one that Slurm keeps is requeued. `say` writes into this node's log.
    """
    try:
        if not _is_orphaned(attempt) or not _is_claimed(attempt):
            return  # somebody ends the run, or its batch script is alive out there
        decision = _decision(attempt)
    except (ClusterrunError, OSError, ValueError) as error:
        say(f"what follows cannot be decided here: {error}")
        return
    say(f"attempt {attempt.number}: {decision.next.value}: {decision.why}")
    try:
        if decision.next is Next.STOP:
            _end(attempt, decision)
        else:
            say(f"job {_successor(attempt, decision)} goes on with the run")
    except (ClusterrunError, OSError) as error:
        attempt.paths.followed(attempt.number).unlink(missing_ok=True)
        say(f"that cannot be done from here: {error}")
        if decision.next is not Next.STOP and attempt.plan.spare_nodes:
            _scheduler(say, "scontrol", "requeue", attempt.who.job_id)
    else:
        _scheduler(say, "scancel", attempt.who.job_id)


def _is_orphaned(attempt: Attempt) -> bool:
    """Say whether all nodes before this one are lost, and nobody ends the run or goes on with it.

    Once a first node was lost and left out, the batch script is not on the head's any more.
    """
    who = attempt.who
    if not 0 < who.node_rank <= HEIRS:
        return False
    is_batch_host = parse_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))[:1] == [who.nodes[0]]
    has_gone_on = attempt.paths.attempt(attempt.number + 1).exists()
    if not is_batch_host or has_gone_on or _is_ended(attempt):
        return False
    before = who.nodes[: who.node_rank]
    return unreachable(who.nodes[: who.node_rank + 1]) == before


def _is_ended(attempt: Attempt) -> bool:
    try:
        return attempt.paths.request(attempt.number).read_text().strip() in ENDING
    except FileNotFoundError:
        return False


def _is_claimed(attempt: Attempt) -> bool:
    """Take what follows in hand, unless somebody has."""
    claim = attempt.paths.followed(attempt.number)
    try:
        files.create(claim, f"{attempt.who.node}\n")
    except FileExistsError:
        return False
    return True


def _decision(attempt: Attempt) -> Decision:
    env = {**os.environ, "SLURM_JOB_NODELIST": ""}  # without its script the job's nodes are no use
    return conclude(attempt.paths.root, attempt.number, LOST, env)


def _successor(attempt: Attempt, decision: Decision) -> str:
    words = ("successor", str(attempt.paths.root), ",".join(decision.exclude))
    argv = module_argv(sys.executable, "clusterrun.backends", *words)
    done = shell.run(argv, timeout_s=SUBMIT_S)
    if done.rc:
        raise ClusterrunError(" ".join(done.stderr.split()) or f"status {done.rc}")
    return done.stdout.strip()


def _end(attempt: Attempt, decision: Decision) -> None:
    """Leave the last word about the run."""
    end = {
        "schema": "clusterrun.end/1",
        "state": decision.state.value,
        "exit_code": 0 if decision.state is JobState.COMPLETED else LOST,
        "ended_at": time.time(),
    }
    files.write_whole(attempt.paths.end, json.dumps(end) + "\n")


def _scheduler(say: Callable[[str], None], *argv: str) -> None:
    try:
        done = shell.run(argv)
        refusal = " ".join(done.stderr.split()) if done.rc else ""
    except ClusterrunError as error:
        refusal = str(error)
    if refusal:
        say(f"{' '.join(argv)}: {refusal}")
