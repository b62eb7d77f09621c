"""Look closer at one job that waits: one more call to its scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import os
import re
import time

from clusterrun.backends.slurm import nodes
from clusterrun.backends.slurm.outlook import (
    Lookup,
    NodeRequest,
    lookup,
    of_nodes,
    of_reservations,
)
from clusterrun.backends.slurm.reasons import WAITS_FOR_REPAIR
from clusterrun.backends.status import JobStatus
from clusterrun.config.choices import Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.plan import read_plan
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.sizes import parse_bytes

_FEATURES = re.compile(r"[\w.-]+(?:&[\w.-]+)*\Z")
# Options of sbatch that do not decide which nodes a job can use.
_HARMLESS = ("--licenses", "-L", "--comment", "--mail", "--nice", "--wckey", "--account", "--qos")


def explained(job: JobStatus) -> JobStatus:
    """Add why the job waits in numbers, and what would start sooner.

    Leave the status as it is if the job does not wait for nodes, or Slurm does not answer.
    """
    pending = job.pending
    if pending is None or not job.partition or job.asked_nodes is None:
        return job
    wanted = lookup(pending.code, names_nodes=pending.names_nodes)
    if wanted is Lookup.NOTHING:
        return job
    try:
        request = request_of(job, read_plan(job.record.paths))
    except (OSError, ValueError):
        return job
    cluster = job.record.slurm_cluster
    if wanted is Lookup.RESERVATIONS:
        found = of_reservations(request, nodes.reservations(cluster), time.time())
    else:
        found = of_nodes(pending.code, request, nodes.node_groups(cluster), _own_groups())
    if found.is_out:
        pending = dataclasses.replace(pending, text=WAITS_FOR_REPAIR, can_start=None)
    changes = tuple(one for one in found.sooner if one.nodes is None or not _keeps_nodes(job))
    outlook = dataclasses.replace(found, sooner=changes)
    return dataclasses.replace(job, pending=pending, outlook=outlook)


def _keeps_nodes(job: JobStatus) -> bool:
    """Return whether the run's checkpoint may be of shards, which other worlds can't read."""
    return job.has_checkpoint and job.record.strategy != Strategy.DDP.value


def _own_groups() -> frozenset[str]:
    """Return the names of this user's groups."""
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(number).gr_name)
    return frozenset(names)


def request_of(job: JobStatus, plan: Plan) -> NodeRequest:
    """Return what a job requests: of Slurm what may have changed since, else of the plan."""
    constraint = plan.directive("constraint") or ""
    is_simple = not constraint or _FEATURES.match(constraint) is not None
    has_own_nodes = plan.directive("nodelist") or plan.directive("reservation")
    is_usual = all(arg.startswith(_HARMLESS) for arg in plan.sbatch_args)
    exclude = _hosts(plan.directive("exclude") or "")
    return NodeRequest(
        partitions=tuple(job.partition.split(",")),
        nodes=job.asked_nodes or 0,
        limit_s=job.asked_limit_s,
        gpus=plan.gpus_per_node,
        gpu_type=_gpu_type(plan),
        cpus=int(plan.directive("cpus-per-task") or 0),
        memory_mb=_memory_mb(plan),
        features=tuple(constraint.split("&")) if constraint else (),
        exclude=exclude or frozenset(),
        spare_nodes=plan.spare_nodes,
        is_exact=is_simple and is_usual and not has_own_nodes and exclude is not None,
    )


def _gpu_type(plan: Plan) -> str:
    asked = plan.directive("gpus-per-node") or (plan.directive("gres") or "").removeprefix("gpu:")
    return asked.rpartition(":")[0]


def _hosts(text: str) -> frozenset[str] | None:
    try:
        return frozenset(parse_hostlist(text)) if text else frozenset()
    except UsageError:
        return None


def _memory_mb(plan: Plan) -> int:
    """Return the memory of a node; a bare number means MB to Slurm."""
    text = plan.directive("mem") or "0"
    with contextlib.suppress(UsageError):
        return int(text) if text.isdecimal() else parse_bytes(text) >> 20
    return 0
