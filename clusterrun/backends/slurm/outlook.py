"""Why a job waits, in numbers, and what would start sooner; pure.

Only Slurm's reason decides whether a job can start: a partition's limits do not bind every QOS,
and powered-down cloud nodes may be hidden. The numbers explain the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from clusterrun.backends.slurm.nodes import NodeGroup, Reservation, Use

MOST_PARTITIONS: Final = 3
MOST_REASONS: Final = 3
MOST_CHANGES: Final = 4
STEP_S: Final = 300  # a suggested time limit ends on five minutes, and leaves as much to spare


class Lookup(Enum):
    """What to ask Slurm about a job that waits: one call."""

    NODES = "nodes"
    RESERVATIONS = "reservations"
    NOTHING = "nothing"


# Of other reasons, such as a dependency or a limit of the QOS, the nodes say nothing.
_NODES: Final = frozenset(
    {
        *("Resources", "Priority", "Constraints", "BadConstraints", "NodeDown"),
        *("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig"),
        *("PartitionDown", "PartitionInactive", "Nodes required for job are DOWN"),
    }
)


def lookup(code: str, *, names_nodes: bool = False) -> Lookup:
    """Return what to ask about a reason code; `names_nodes`: Slurm named nodes that are out."""
    if code == "ReqNodeNotAvail" and not names_nodes:
        return Lookup.RESERVATIONS
    return Lookup.NODES if code in _NODES or names_nodes else Lookup.NOTHING


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """What a job requests; None and 0 mean nothing or unknown.

    `nodes` includes `spare_nodes`. `is_exact`: these fields decide which nodes it can use.
    """

    partitions: tuple[str, ...]
    nodes: int
    limit_s: int | None
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 0
    memory_mb: int = 0
    features: tuple[str, ...] = ()
    exclude: frozenset[str] = frozenset()
    spare_nodes: int = 0
    is_exact: bool = True


class FactKind(Enum):
    """What is known about a job that waits."""

    NODES = "nodes"
    TOO_MANY_NODES = "too_many_nodes"
    TOO_LONG = "too_long"
    NO_SUCH_GPU = "no_such_gpu"
    TOO_MANY_GPUS = "too_many_gpus"
    NODES_OUT = "nodes_out"
    PARTITION_DOWN = "partition_down"
    RESERVATION = "reservation"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact: what was requested (`asked`) and what there is (`limit`), as numbers.

    They are nodes, GPUs of a node or seconds. `uses` counts the nodes of this kind, `detail` is a
    GPU type, a state and its reason, or the name of a reservation.
    """

    kind: FactKind
    partition: str = ""
    asked: int | None = None
    limit: int | None = None
    uses: tuple[tuple[Use, int], ...] = ()
    nodes: str = ""
    state: str = ""
    detail: str = ""
    start: float | None = None
    end: float | None = None


class ChangeKind(Enum):
    """What could be changed about a request."""

    NODES = "nodes"
    TIME = "time"
    PARTITION = "partition"
    GPU_TYPE = "gpu_type"


@dataclass(frozen=True, kw_only=True)
class Sooner:
    """A change that may start the job sooner; `idle` nodes are free for it now.

    Only what changes is set.
    """

    kind: ChangeKind
    idle: int | None = None
    nodes: int | None = None
    limit_s: int | None = None
    partition: str = ""
    gpu_type: str = ""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The facts about a job that waits, and what would start sooner.

    `is_out`: what it lacks are nodes that are down or drained, so it can start again later.
    """

    facts: tuple[Fact, ...] = ()
    sooner: tuple[Sooner, ...] = ()
    is_out: bool = False


def of_nodes(
    code: str, request: NodeRequest, groups: Sequence[NodeGroup], mine: Collection[str] = ()
) -> Outlook:
    """Explain a wait from sinfo's answer; `mine` are the groups of the user."""
    own = [name for name in request.partitions if any(g.partition == name for g in groups)]
    facts = [fact for name in own[:MOST_PARTITIONS] for fact in _facts(request, name, groups)]
    usable = [group for group in groups if _may_use(group, mine)]
    out = code == "PartitionNodeLimit" and any(fact.kind is FactKind.NODES_OUT for fact in facts)
    sooner = _sooner(code, request, own, usable) if own else ()
    return Outlook(facts=tuple(facts), sooner=tuple(sooner), is_out=out)


def _may_use(group: NodeGroup, mine: Collection[str]) -> bool:
    is_open = not group.groups or not set(group.groups).isdisjoint(mine)
    return group.is_up and is_open and not group.is_root_only


# Facts


def _facts(request: NodeRequest, partition: str, groups: Sequence[NodeGroup]) -> Iterator[Fact]:
    here = _of(partition, groups)
    limit_s = here[0].limit_s
    if not here[0].is_up:
        yield Fact(kind=FactKind.PARTITION_DOWN, partition=partition)
    if _exceeds(request, limit_s):
        asked = request.limit_s
        yield Fact(kind=FactKind.TOO_LONG, partition=partition, asked=asked, limit=limit_s)
    most = max(_gpus(group, request.gpu_type) for group in here)
    if request.is_exact and most < request.gpus:
        yield Fact(
            kind=FactKind.TOO_MANY_GPUS if most else FactKind.NO_SUCH_GPU,
            partition=partition,
            asked=request.gpus,
            limit=most or None,
            detail=request.gpu_type,
        )
    else:
        yield from _node_facts(request, partition, here)


def _node_facts(request: NodeRequest, partition: str, here: Sequence[NodeGroup]) -> Iterator[Fact]:
    fitting = [group for group in here if _fits(group, request)]
    uses = {use: _count([g for g in fitting if g.use is use], request) for use in Use}
    total, limit, asked = _count(fitting, request), _limit(here, request), request.nodes
    if asked > limit:
        yield Fact(kind=FactKind.TOO_MANY_NODES, partition=partition, asked=asked, limit=limit)
    if found := tuple((use, number) for use, number in uses.items() if number):
        yield Fact(
            kind=FactKind.NODES,
            partition=partition,
            asked=asked,
            limit=total,
            uses=found,
            detail=request.gpu_type,
        )
    if asked <= limit and total - uses[Use.OUT] < asked:
        out = [group for group in fitting if group.use is Use.OUT]
        for group in sorted(out, key=lambda group: -group.count)[:MOST_REASONS]:
            yield Fact(
                kind=FactKind.NODES_OUT,
                partition=partition,
                nodes=group.nodes,
                state=group.state,
                detail=group.reason,
            )


def _gpus(group: NodeGroup, kind: str) -> int:
    return sum(number for name, number in group.gpus if kind in ("", name))


def _fits(group: NodeGroup, request: NodeRequest) -> bool:
    """Return whether empty nodes of this kind could run the job, as far as is known."""
    if not request.is_exact:
        return True
    return (
        _gpus(group, request.gpu_type) >= request.gpus
        and (group.cpus is None or group.cpus >= request.cpus)
        and (group.memory_mb is None or group.memory_mb >= request.memory_mb)
        and group.features.issuperset(request.features)
    )


def _count(groups: Iterable[NodeGroup], request: NodeRequest, without: Collection[str] = ()) -> int:
    leave = request.exclude.union(without)
    if not leave:
        return sum(group.count for group in groups)
    return len({host for group in groups for host in group.hosts} - leave)


# What would start sooner


def _sooner(
    code: str, request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]
) -> list[Sooner]:
    found = [*_shorter(request, own, groups)]
    if request.is_exact:
        found += [*_fewer(code, request, own, groups), *_elsewhere(code, request, own, groups)]
        found += _other_gpus(request, own, groups)
    return found[:MOST_CHANGES]


def _shorter(
    request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]
) -> Iterator[Sooner]:
    """Offer the longest limit that the job's partitions allow, if that is all it exceeds."""
    allowed = _allowed_s(request, own, groups)
    if allowed and any(request.nodes <= _limit(_of(name, groups), request) for name in own):
        yield Sooner(kind=ChangeKind.TIME, limit_s=allowed)


def _allowed_s(request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]) -> int | None:
    """Return the longest limit of the job's partitions if the request exceeds it."""
    limits = [group.limit_s for group in groups if group.partition in own]
    known = [limit for limit in limits if limit is not None]
    most = max(known) if known and len(known) == len(limits) else None
    return most if _exceeds(request, most) else None


def _limit(here: Sequence[NodeGroup], request: NodeRequest) -> int:
    """Return how many nodes of a partition the job may have."""
    total = _count([group for group in here if _fits(group, request)], request)
    most = here[0].most_nodes if here else 0
    return total if most is None else min(total, most)


def _exceeds(request: NodeRequest, limit_s: int | None) -> bool:
    return limit_s is not None and (request.limit_s is None or request.limit_s > limit_s)


def _idle(groups: Iterable[NodeGroup], request: NodeRequest, without: Collection[str] = ()) -> int:
    idle = [group for group in groups if group.use is Use.IDLE and _fits(group, request)]
    return _count(idle, request, without)


def _fewer(
    code: str, request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]
) -> Iterator[Sooner]:
    """Offer the nodes that are idle now, if only their number keeps the job waiting."""
    if code not in ("Resources", "PartitionNodeLimit"):
        return
    idle = max((_idle(_of(name, groups), request) for name in own), default=0)
    most = min((g.most_nodes for g in groups if g.partition in own and g.most_nodes), default=idle)
    nodes = min(idle, most) - request.spare_nodes
    if 0 < nodes < request.nodes - request.spare_nodes:
        limit_s = _allowed_s(request, own, groups)
        yield Sooner(kind=ChangeKind.NODES, idle=idle, nodes=nodes, limit_s=limit_s)


def _of(partition: str, groups: Iterable[NodeGroup]) -> list[NodeGroup]:
    return [group for group in groups if group.partition == partition]


def _elsewhere(
    code: str, request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]
) -> list[Sooner]:
    """Offer partitions with enough idle nodes.

    Idle nodes of its own partitions do not count if they did not help: jobs ahead get them.
    """
    shared = {host for group in groups if group.partition in own for host in group.hosts}
    useless = shared if code == "Priority" else frozenset[str]()
    found = []
    for name in dict.fromkeys(group.partition for group in groups):
        here = _of(name, groups)
        idle = _idle(here, request, useless)
        most = here[0].most_nodes
        if name in own or idle < request.nodes or (most is not None and most < request.nodes):
            continue
        limit_s = here[0].limit_s if _exceeds(request, here[0].limit_s) else None
        found.append(Sooner(kind=ChangeKind.PARTITION, partition=name, idle=idle, limit_s=limit_s))
    return sorted(found, key=lambda one: (one.limit_s is not None, -(one.idle or 0)))[:2]


def _other_gpus(
    request: NodeRequest, own: Sequence[str], groups: Sequence[NodeGroup]
) -> Iterator[Sooner]:
    """Offer one other GPU type of its own partitions with enough idle nodes."""
    if not request.gpu_type:
        return
    for name in own:
        here = _of(name, groups)
        for kind in sorted({kind for group in here for kind, _ in group.gpus}):
            idle = _idle(here, replace(request, gpu_type=kind))
            if kind not in ("", request.gpu_type) and idle >= request.nodes:
                yield Sooner(kind=ChangeKind.GPU_TYPE, idle=idle, gpu_type=kind)
                return


# Reservations


def of_reservations(
    request: NodeRequest, reservations: Sequence[Reservation], now: float
) -> Outlook:
    """Explain a wait by the reservations that are in its way; they may be of other nodes."""
    horizon = float("inf") if request.limit_s is None else now + request.limit_s
    near = [one for one in reservations if one.end > now and one.start < horizon]
    own = [one for one in near if one.partition in ("", *request.partitions)]
    ahead = sorted(own, key=lambda one: one.start)[:MOST_REASONS]
    facts = tuple(
        Fact(
            kind=FactKind.RESERVATION,
            detail=one.name,
            state="maintenance" if one.is_maintenance else "",
            nodes=one.nodes,
            start=one.start,
            end=one.end,
        )
        for one in ahead
    )
    future = [one.start for one in ahead if one.start > now]
    limit_s = (int(min(future) - now) // STEP_S - 1) * STEP_S if future else 0
    shorter = (Sooner(kind=ChangeKind.TIME, limit_s=limit_s),) if limit_s > 0 else ()
    return Outlook(facts=facts, sooner=shorter)
