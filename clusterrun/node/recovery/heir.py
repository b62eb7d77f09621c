"""Continue a run that has lost the head's node and with it the conductor.

Slurm requeues the job minutes later, when it marks the node down. It keeps a job that may lose
nodes (--no-kill), although nothing runs in it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.node.base.identity import Attempt
from clusterrun.node.recovery.conclude import conclude
from clusterrun.node.recovery.reach import unreachable
from clusterrun.rundir.claims import claim
from clusterrun.rundir.outcome import Next, write_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.request import Reason
from clusterrun.shared import shell
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.state import JobState

HEIRS = 3  # nodes after the head's: more are rarely lost together, and each one asks Slurm
SUBMIT_S = 60.0
SIGN_S = 20.0  # a conductor on hosts gives a sign of life every 5 s
LOOK_S = 0.5
LOST = int(NodeExit.NODE_LOST)
ENDING = (Reason.CANCEL.value, Reason.END.value)


def inherit(attempt: Attempt, say: Callable[[str], None]) -> None:
    """On the next surviving node, act for the lost conductor: submit what follows, or end the run.

    Then cancel this job: nothing more can start in it. If no job can be submitted from here,
    requeue this one if Slurm keeps it. `say` writes to this node's log.
    """
    if attempt.plan.cluster.scheduler.has_hosts:
        _end_on_hosts(attempt, say)
        return
    is_ours = False
    try:
        is_ours = _is_orphaned(attempt) and claim(attempt.paths, attempt.number, attempt.who.node)
        if not is_ours:
            return  # the run is being ended, or its conductor is still alive
        env = {**os.environ, "SLURM_JOB_NODELIST": ""}  # useless without the batch host
        decision = conclude(attempt.paths.root, attempt.number, LOST, env)
    except (ClusterrunError, OSError, ValueError) as error:
        if is_ours:  # the conductor may decide, if it is alive after all
            attempt.paths.followed(attempt.number).unlink(missing_ok=True)
        say(f"cannot decide what follows attempt {attempt.number}: {error}")
        return
    say(f"attempt {attempt.number}: {decision.next.value}: {decision.why}")
    try:
        if decision.next is Next.STOP:
            code = 0 if decision.state is JobState.COMPLETED else LOST
            write_end(attempt.paths, decision.state, code)
        else:
            root, excluded = str(attempt.paths.root), ",".join(decision.exclude)
            argv = [sys.executable, "-m", "clusterrun.backends.slurm.successor", root, excluded]
            # Not in the working directory: the user's modules may shadow ours.
            done = shell.run(argv, timeout_s=SUBMIT_S, cwd=attempt.paths.root)
            if done.rc:
                raise ClusterrunError(" ".join(done.stderr.split()) or f"exit status {done.rc}")
            say(f"job {done.stdout.strip()} continues the run")
    except (ClusterrunError, OSError) as error:
        attempt.paths.followed(attempt.number).unlink(missing_ok=True)
        say(f"cannot carry out this decision: {error}")
        if decision.next is not Next.STOP and attempt.plan.spare_nodes:
            _scheduler(say, "scontrol", "requeue", attempt.who.job_id)
    else:
        _scheduler(say, "scancel", attempt.who.job_id)


def _end_on_hosts(attempt: Attempt, say: Callable[[str], None]) -> None:
    """Record that a run lost its first host: nothing can start from another one."""
    paths, who = attempt.paths, attempt.who
    try:
        if _is_conducted(attempt) or not claim(paths, attempt.number, who.node):
            return
        write_end(paths, JobState.NODE_FAIL, LOST)
    except OSError as error:
        say(f"cannot write to {paths.root}: {error}")
    what = f"{who.nodes[0]}, which conducts the run, is lost: the run has ended"
    say(f"{what}; continue it with 'clusterrun resume {who.job_id}'")


def _is_conducted(attempt: Attempt) -> bool:
    """Wait for a sign of the conductor on the first host; return whether there is one."""
    paths, until = attempt.paths, time.monotonic() + SIGN_S
    before = _signed_at(paths)
    while _signed_at(paths) == before:
        if paths.newest_attempt() > attempt.number or _is_ended(attempt):
            return True
        if before is None or time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True


def _signed_at(paths: RunPaths) -> float | None:
    """Return when the conductor last touched its file; None if this host does not see it."""
    with contextlib.suppress(FileNotFoundError), open(paths.controller) as file:
        return os.fstat(file.fileno()).st_mtime  # NFS looks anew at what is opened
    return None


def _is_orphaned(attempt: Attempt) -> bool:
    """Return whether all nodes before this one are lost, and nothing else decides.

    If an earlier attempt lost its first node, the conductor is not on the head's node.
    """
    who = attempt.who
    if not attempt.plan.cluster.scheduler.reads_sbatch or not 0 < who.node_rank <= HEIRS:
        return False
    is_batch_host = parse_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))[:1] == [who.nodes[0]]
    has_gone_on = attempt.paths.newest_attempt() > attempt.number
    if not is_batch_host or has_gone_on or _is_ended(attempt):
        return False
    before = who.nodes[: who.node_rank]
    return unreachable(who.nodes[: who.node_rank + 1]) == before


def _is_ended(attempt: Attempt) -> bool:
    try:
        return attempt.paths.request(attempt.number).read_text().strip() in ENDING
    except FileNotFoundError:
        return False


def _scheduler(say: Callable[[str], None], *argv: str) -> None:
    try:
        done = shell.run(argv)
        refusal = " ".join(done.stderr.split()) if done.rc else ""
    except ClusterrunError as error:
        refusal = str(error)
    if refusal:
        say(f"{' '.join(argv)}: {refusal}")
