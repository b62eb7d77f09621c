"""Why a job waits, in numbers, and what would start sooner: one more call to Slurm for one job.

Only Slurm's reason decides whether a job can start: a partition's limits do not bind every QOS,
and powered-down cloud nodes may be hidden. The numbers explain the reason.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm.query import pairs, parse_time
from clusterrun.backends.slurm.reasons import WAITS_FOR_REPAIR, Fact, FactKind, Outlook, Sooner, Use
from clusterrun.backends.slurm.site import NodeGroup, answer, node_groups
from clusterrun.backends.status import JobStatus
from clusterrun.config.choices import Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.reading import read_plan
from clusterrun.shared.amounts import parse_bytes
from clusterrun.shared.hostlist import parse_hostlist

MOST_REASONS: Final = 3
STEP_S: Final = 300  # a suggested time limit ends on five minutes, and leaves as much to spare
# Of other reasons, such as a dependency or a limit of the QOS, the nodes say nothing.
OF_NODES: Final = {
    *("Resources", "Priority", "Constraints", "BadConstraints", "NodeDown"),
    *("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig"),
    *("PartitionDown", "PartitionInactive", "Nodes required for job are DOWN"),
}
_FEATURES: Final = re.compile(r"[\w.-]+(?:&[\w.-]+)*\Z")


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """What a job requests; None and 0 mean nothing or unknown."""

    partitions: tuple[str, ...]
    nodes: int
    limit_s: int | None
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 0
    memory_mb: int = 0
    features: tuple[str, ...] = ()
    exclude: frozenset[str] = frozenset()
    spare_nodes: int = 0  # included in `nodes`
    is_exact: bool = True  # these fields decide which nodes the job can use

    def exceeds(self, limit_s: int | None) -> bool:
        """Return whether the job may run for longer than a limit."""
        return limit_s is not None and (self.limit_s is None or self.limit_s > limit_s)

    def fits(self, group: NodeGroup) -> bool:
        """Return whether empty nodes of this kind could run the job, as far as is known."""
        if not self.is_exact:
            return True
        gpus = sum(number for name, number in group.gpus if self.gpu_type in ("", name))
        return (
            gpus >= self.gpus
            and (group.cpus is None or group.cpus >= self.cpus)
            and (group.memory_mb is None or group.memory_mb >= self.memory_mb)
            and group.features.issuperset(self.features)
        )

    def count(self, groups: Iterable[NodeGroup], without: Collection[str] = ()) -> int:
        """Return how many nodes of these groups it could use."""
        hosts = {host for group in groups if self.fits(group) for host in group.hosts}
        return len(hosts - self.exclude.union(without))

    def idle(self, groups: Iterable[NodeGroup], without: Collection[str] = ()) -> int:
        """Return how many nodes of these groups it could use now."""
        return self.count((group for group in groups if group.use is Use.IDLE), without)

    def most(self, here: Sequence[NodeGroup]) -> int:
        """Return how many nodes the job may have of a partition, which has these groups."""
        usable = self.count(here)
        limit = here[0].most_nodes if here else None  # the partition's: all groups have it
        return usable if limit is None else min(usable, limit)


def explained(job: JobStatus) -> JobStatus:
    """Add why a job waits for nodes, in numbers, and what would start sooner, if Slurm answers."""
    pending, asked = job.pending, job.asked
    if not (pending and asked and asked.partition and asked.asked_nodes is not None):
        return job  # it does not wait, or its request is unknown
    waits_for_nodes = pending.names_nodes or pending.code in OF_NODES
    if not waits_for_nodes and pending.code != "ReqNodeNotAvail":
        return job  # the numbers of nodes explain nothing
    try:
        request = request_of(asked, read_plan(job.record.paths))
    except (OSError, ValueError, UsageError):
        return job
    cluster = job.record.slurm_cluster
    if waits_for_nodes:
        found = of_nodes(pending.code, request, node_groups(cluster))
    else:
        text = answer(cluster, "scontrol", "--oneliner", "show", "reservation")
        found = of_reservations(request, text, time.time())
    if found.is_out:  # not Slurm's reason: what it lacks are nodes that are down or drained
        pending = dataclasses.replace(pending, text=WAITS_FOR_REPAIR, can_start=None)
    # A checkpoint may consist of shards, which only the same number of ranks can read.
    keeps_nodes = job.has_checkpoint and job.record.strategy != Strategy.DDP.value
    changes = tuple(one for one in found.sooner if one.nodes is None or not keeps_nodes)
    outlook = dataclasses.replace(found, sooner=changes)
    return dataclasses.replace(job, pending=pending, outlook=outlook)


def request_of(job: SchedulerJob, plan: Plan) -> NodeRequest:
    """Return a job's request, from Slurm if it may change, or as planned. Raises UsageError."""
    constraint, memory = plan.directive("constraint") or "", plan.directive("mem") or "0"
    is_simple = not constraint or _FEATURES.match(constraint) is not None
    has_own_nodes = plan.directive("nodelist") or plan.directive("reservation")
    # [TYPE:]COUNT, or gpu:[TYPE:]COUNT.
    gpus = plan.directive("gpus-per-node") or (plan.directive("gres") or "").removeprefix("gpu:")
    exclude = plan.directive("exclude")
    return NodeRequest(
        partitions=tuple(job.partition.split(",")),
        nodes=job.asked_nodes or 0,
        limit_s=job.limit_s,
        gpus=plan.gpus_per_node,
        gpu_type=gpus.rpartition(":")[0],
        cpus=int(plan.directive("cpus-per-task") or 0),
        # A bare number means MB to Slurm.
        memory_mb=int(memory) if memory.isdecimal() else parse_bytes(memory) >> 20,
        features=tuple(constraint.split("&")) if constraint else (),
        exclude=frozenset(parse_hostlist(exclude) if exclude else ()),
        spare_nodes=plan.spare_nodes,
        is_exact=is_simple and not (has_own_nodes or plan.sbatch_args),  # no other choice of nodes
    )


def of_nodes(code: str, request: NodeRequest, groups: Sequence[NodeGroup]) -> Outlook:
    """Explain a wait from sinfo's answer."""
    known = {group.partition for group in groups}
    own = [name for name in dict.fromkeys(request.partitions) if name in known]
    facts = tuple(fact for name in own for fact in _facts(request, _in_partition(name, groups)))
    # This code also means that nodes which the job needs are down or drained.
    is_out = code == "PartitionNodeLimit" and any(f.kind is FactKind.NODES_OUT for f in facts)
    usable = [group for group in groups if group.is_up]
    sooner = tuple(_sooner(code, request, own, usable)) if own else ()
    return Outlook(facts=facts, sooner=sooner, is_out=is_out)


def _in_partition(partition: str, groups: Iterable[NodeGroup]) -> list[NodeGroup]:
    return [group for group in groups if group.partition == partition]


def _facts(request: NodeRequest, here: Sequence[NodeGroup]) -> Iterator[Fact]:
    """Yield which limits of a partition the job exceeds, and how its usable nodes are used now."""
    name, limit_s, asked = here[0].partition, here[0].limit_s, request.nodes
    if request.exceeds(limit_s):
        yield Fact(kind=FactKind.TOO_LONG, partition=name, asked=request.limit_s, limit=limit_s)
    uses = {use: request.count(g for g in here if g.use is use) for use in Use}
    total, limit = request.count(here), request.most(here)  # usable; of these, allowed
    about = Fact(
        kind=FactKind.NODES,
        partition=name,
        asked=asked,
        limit=total,
        uses=tuple((use, number) for use, number in uses.items() if number),
        detail=request.gpu_type,
    )
    if asked > limit:
        yield dataclasses.replace(about, kind=FactKind.TOO_MANY_NODES, limit=limit, uses=())
    if about.uses:
        yield about
    needs_nodes_out = asked <= limit and total - uses[Use.OUT] < asked
    if needs_nodes_out:
        out = [group for group in here if group.use is Use.OUT and request.fits(group)]
        for group in sorted(out, key=lambda group: -group.count)[:MOST_REASONS]:
            yield Fact(
                kind=FactKind.NODES_OUT,
                partition=name,
                nodes=group.nodes,
                state=group.state,
                detail=group.reason,
            )


def _sooner(
    code: str, request: NodeRequest, own_partitions: Sequence[str], groups: Sequence[NodeGroup]
) -> Iterator[Sooner]:
    """Offer the longest allowed time limit, the nodes that are idle now, and other partitions."""
    mine = [group for group in groups if group.partition in own_partitions]
    limits = [group.limit_s for group in mine if group.limit_s is not None]
    most_s = max(limits) if mine and len(limits) == len(mine) else None  # None: one has no limit
    allowed_s = most_s if request.exceeds(most_s) else None
    here = [_in_partition(name, groups) for name in own_partitions]
    if allowed_s and any(request.nodes <= request.most(each) for each in here):
        yield Sooner(limit_s=allowed_s)
    if not request.is_exact:
        return  # it is unknown which nodes the job could use
    idle = max(map(request.idle, here))
    most = min((group.most_nodes for group in mine if group.most_nodes), default=idle)
    nodes = min(idle, most) - request.spare_nodes  # what --nodes counts
    is_fewer = 0 < nodes < request.nodes - request.spare_nodes
    if is_fewer and code in ("Resources", "PartitionNodeLimit"):  # otherwise, fewer do not help
        yield Sooner(idle=idle, nodes=nodes, limit_s=allowed_s)
    others = [group for group in groups if group not in mine]
    # Behind other jobs, idle nodes of the own partitions do not help: those jobs get them.
    promised = {host for group in mine for host in group.hosts} if code == "Priority" else set()
    yield from _other_partitions(request, others, promised)


def _other_partitions(
    request: NodeRequest, groups: Sequence[NodeGroup], promised: Collection[str]
) -> list[Sooner]:
    """Return two partitions with enough idle nodes that are not `promised`, shorter limits last."""
    found = []
    for name in dict.fromkeys(group.partition for group in groups):
        here = _in_partition(name, groups)
        idle, limit_s = request.idle(here, promised), here[0].limit_s
        if request.nodes <= min(idle, request.most(here)):
            shorter_s = limit_s if request.exceeds(limit_s) else None
            found.append(Sooner(partition=name, idle=idle, limit_s=shorter_s))
    return sorted(found, key=lambda one: (one.limit_s is not None, -(one.idle or 0)))[:2]


def of_reservations(request: NodeRequest, text: str, now: float) -> Outlook:
    """Explain a wait by reservations, as `scontrol --oneliner show reservation` prints them."""
    latest_end = float("inf") if request.limit_s is None else now + request.limit_s
    facts = []
    for line in text.splitlines():
        row = pairs(line.replace("=(null)", "="))
        start, end = parse_time(row.get("StartTime", "")), parse_time(row.get("EndTime", ""))
        is_own = row.get("PartitionName", "") in ("", *request.partitions)
        overlaps = bool(start and end and start < latest_end and end > now)
        if is_own and overlaps:  # its nodes are not compared with those that the job could use
            reservation = Fact(
                kind=FactKind.RESERVATION,
                detail=row.get("ReservationName", ""),
                state="maintenance" if "MAINT" in row.get("Flags", "").split(",") else "",
                nodes=row.get("Nodes", ""),
                start=start,
                end=end,
            )
            facts.append(reservation)
    ahead = sorted(facts, key=lambda one: one.start or 0)[:MOST_REASONS]
    future = [one.start for one in ahead if one.start and one.start > now]
    steps = int(min(future) - now) // STEP_S - 1 if future else 0  # one to spare
    shorter = (Sooner(limit_s=steps * STEP_S),) if steps > 0 else ()
    return Outlook(facts=tuple(ahead), sooner=shorter)
