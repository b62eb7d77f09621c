"""See to a run that has lost the head's node, and with it the conductor.

Slurm requeues the job when it marks the node down, minutes later. But it keeps a job that may lose
nodes (--no-kill), although nothing runs in it; and hosts have no queue.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.node.base.identity import Attempt
from clusterrun.node.recovery.reach import unreachable
from clusterrun.rundir.outcome import write_end
from clusterrun.rundir.request import Reason, read_request
from clusterrun.shared import shell
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.state import JobState

NEAREST = 3  # nodes after the head's: more are rarely lost together, and each one asks Slurm
SIGN_S = 20.0  # a conductor on hosts gives a sign of life every 5 s
LOOK_S = 0.5


def see_to_run(attempt: Attempt, say: Callable[[str], None]) -> None:
    """Requeue a job that Slurm would keep; if nothing can continue the run, record its end.

    `say` writes to this node's log.
    """
    plan, who = attempt.plan, attempt.who
    try:
        if plan.cluster.scheduler.has_hosts:
            is_over = not _is_conducted(attempt)
        else:
            is_kept = plan.spare_nodes > 0 and bool(plan.cluster.scheduler.reads_sbatch)
            is_over = is_kept and _is_nearest(attempt) and not _is_requeued(who.job_id, say)
        if is_over:
            what = f"{who.nodes[0]}, which conducts the run, is lost: the run has ended"
            say(f"{what}; continue it with 'clusterrun resume {who.job_id}'")
            write_end(attempt.paths, JobState.NODE_FAIL, int(NodeExit.NODE_LOST))
    except (ClusterrunError, OSError) as error:
        say(f"cannot see to what follows attempt {attempt.number}: {error}")


def _goes_on(attempt: Attempt) -> bool:
    """Return whether a person ends the run, or a later attempt has begun."""
    is_ending = read_request(attempt.paths.request(attempt.number)) in (Reason.CANCEL, Reason.END)
    return is_ending or attempt.paths.newest_attempt() > attempt.number


def _is_conducted(attempt: Attempt) -> bool:
    """Wait for a sign of the conductor on the first host; return whether there is one."""
    before, until = _signed_at(attempt), time.monotonic() + SIGN_S
    while before is not None and time.monotonic() < until and not _goes_on(attempt):
        if _signed_at(attempt) != before:
            return True
        time.sleep(LOOK_S)
    return _goes_on(attempt)


def _signed_at(attempt: Attempt) -> float | None:
    """Return when the conductor last touched its file; None if this host does not see it."""
    with contextlib.suppress(FileNotFoundError), open(attempt.paths.controller) as file:
        return os.fstat(file.fileno()).st_mtime  # NFS looks anew at what is opened
    return None


def _is_nearest(attempt: Attempt) -> bool:
    """Return whether all nodes before this one are lost, and nothing else continues the run.

    If an earlier attempt lost its first node, the conductor is not on the head's node.
    """
    who = attempt.who
    is_batch_host = parse_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))[:1] == [who.nodes[0]]
    if not 0 < who.node_rank <= NEAREST or not is_batch_host or _goes_on(attempt):
        return False
    return unreachable(who.nodes[: who.node_rank + 1]) == who.nodes[: who.node_rank]


def _is_requeued(job_id: str, say: Callable[[str], None]) -> bool:
    """Have Slurm requeue the job, or cancel it if it may not be: it would only hold its nodes."""
    done = shell.run(["scontrol", "requeue", job_id])
    if done.rc:
        say(f"Slurm does not requeue job {job_id}: {' '.join(done.stderr.split())}")
        shell.run(["scancel", job_id])
    return not done.rc
