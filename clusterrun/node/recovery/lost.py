"""Find the nodes of a job that can't be reached, and see to a run that has lost the conductor's.

Slurm requeues the job when it marks the node down, minutes later. But it keeps a job that may lose
nodes (--no-kill), although nothing runs in it; and hosts have no queue.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from clusterrun.errors import ClusterrunError, NodeExit
from clusterrun.node.base.causes import Ending
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.ports import why_closed
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.end import Reason, read_request, write_end
from clusterrun.shared import files, shell
from clusterrun.shared.hostlist import fold_hostlist
from clusterrun.shared.state import JobState

NEAREST = 3  # nodes after the conductor's: more are rarely lost together, and each one asks Slurm
SIGN_S = 20.0  # a conductor on hosts gives a sign of life every 5 s
LOOK_S = 0.5
ASK_S = 15.0
CONNECT_S = 3.0
AT_ONCE = 64
_NODE = r"\bNodeName=(\S+)"
_ADDRESS = r"\bNodeAddr=(\S+)"
_PORT = r"\bPort=(\d+)"
_SITE_PORT = r"(?m)^SlurmdPort\s*=\s*(\d+)"


def see_to_run(attempt: Attempt, loss: Ending, say: Callable[[str], None]) -> None:
    """Record the loss; requeue a job that Slurm would keep, or record the end of the run."""
    plan, who = attempt.plan, attempt.who
    try:
        from clusterrun.node.recovery.conclude import outcome_of  # slow to import, seldom needed

        began = read_attempt(attempt.paths, attempt.number).taken_at or time.time()
        lost = outcome_of(loss, attempt.number, who.job_id, who.nodes, began)
        with contextlib.suppress(FileExistsError):  # another agent was first
            files.create(attempt.paths.outcome(attempt.number), lost.to_json())
        if plan.cluster.scheduler.has_hosts:
            is_over = not _await_sign(attempt)
        else:
            # Slurm keeps a job that may lose nodes (--no-kill), although nothing runs in it.
            is_kept = plan.spare_nodes > 0 and bool(plan.cluster.scheduler.reads_sbatch)
            is_over = is_kept and _is_nearest(attempt) and not _requeue(who.job_id, say)
        if is_over:
            what = f"{who.conductor}, which conducts the run, is lost: the run has ended"
            say(f"{what}; continue it with 'clusterrun resume {who.job_id}'")
            write_end(attempt.paths, JobState.NODE_FAIL, int(NodeExit.NODE_LOST))
    except (ClusterrunError, OSError, ImportError) as error:
        say(f"cannot decide what follows attempt {attempt.number}: {error}")


def _is_settled(attempt: Attempt) -> bool:
    """Return whether a person ends the run, or a later attempt has begun."""
    is_ending = read_request(attempt.paths.request(attempt.number)) in (Reason.CANCEL, Reason.END)
    return is_ending or attempt.paths.newest_attempt() > attempt.number


def _await_sign(attempt: Attempt) -> bool:
    """Wait for the conductor's sign, if it can be seen; return whether it came or is not needed."""
    last_sign, deadline = _signed_at(attempt), time.monotonic() + SIGN_S
    while last_sign is not None and time.monotonic() < deadline and not _is_settled(attempt):
        if _signed_at(attempt) != last_sign:
            return True
        time.sleep(LOOK_S)
    return _is_settled(attempt)


def _signed_at(attempt: Attempt) -> float | None:
    """Return when the conductor last touched its file; None if this host does not see it."""
    with contextlib.suppress(FileNotFoundError), open(attempt.paths.controller) as file:
        return os.fstat(file.fileno()).st_mtime  # NFS looks anew at what is opened
    return None


def _is_nearest(attempt: Attempt) -> bool:
    """Return whether this node has to act: the conductor's and all before this one are lost."""
    who = attempt.who
    before = [node for node in who.nodes[: who.node_rank] if node != who.conductor]
    if who.node == who.conductor or len(before) >= NEAREST or _is_settled(attempt):
        return False
    lost = (who.conductor, *before)
    return unreachable((*lost, who.node)) == lost  # this node must answer


def _requeue(job_id: str, say: Callable[[str], None]) -> bool:
    """Have Slurm requeue the job; return whether it does. If not, cancel it: it holds nodes."""
    done = shell.run(["scontrol", "requeue", job_id])
    if done.rc:
        say(f"Slurm does not requeue job {job_id}: {' '.join(done.stderr.split())}")
        shell.run(["scancel", job_id])
    return not done.rc


def unreachable(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes on which slurmd accepts no connection; ask slurmctld twice in all.

    Leave out nodes without a known address and port. Return none if no node answers.
    """
    places = _places(nodes)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        closed = pool.map(lambda at: why_closed(at[0], at[1], CONNECT_S), places.values())
        reasons = dict(zip(places, closed, strict=True))  # by node; "" if slurmd answers
    if all(reasons.values()):
        return ()  # not even this node answers: its own network may be at fault
    return tuple(node for node in nodes if reasons.get(node))


def known_address(node: str) -> str:
    """Return a node's name if it resolves, else its address in Slurm (NodeAddr)."""
    try:
        socket.getaddrinfo(node, None)
    except (OSError, UnicodeError):
        match = re.search(_ADDRESS, _scontrol("--oneliner", "show", "node", node))
        return match[1] if match else node
    return node


def _places(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the address and port of each node's slurmd, as far as Slurm shows them."""
    if not nodes:
        return {}
    site_port = re.search(_SITE_PORT, _scontrol("show", "config"))
    places = {}
    for line in _scontrol("--oneliner", "show", "node", fold_hostlist(nodes)).splitlines():
        name, address, own_port = (re.search(each, line) for each in (_NODE, _ADDRESS, _PORT))
        port = own_port or site_port
        if name and address and port:
            places[name[1]] = (address[1], int(port[1]))
    return places


def _scontrol(*words: str) -> str:
    with contextlib.suppress(ClusterrunError):
        return shell.run(["scontrol", *words], timeout_s=ASK_S).stdout
    return ""
