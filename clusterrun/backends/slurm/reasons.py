"""Slurm's reason codes in plain words: why a job waits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

UNAVAILABLE = "UnavailableNodes:"
# A limit on one job, or on its share of one node: waiting does not help.
_LIMIT_OF_ONE = re.compile(r"(QOS|Assoc)Max(\w{1,40}?)Per(Job|Node)(?:Limit)?$")
_WHAT = {"Cpu": "CPUs", "GRES": "GPUs", "Mem": "memory", "Memory": "memory", "Node": "nodes"}
_WHAT["WallDuration"] = "time"
WAITS_FOR_REPAIR = "nodes that it needs are down or drained"

# What codes mean, by whether waiting is enough. Of several that begin a code, the longest counts.
_MEANINGS: dict[bool | None, dict[str, str]] = {
    True: {
        "Resources": "waiting for free nodes",
        "Priority": "jobs with higher priority are ahead",
        "None": "the scheduler has not considered it yet",
        "Dependency": "waiting for another job",
        "BeginTime": "its start time has not come yet",
        "ReqNodeNotAvail": "nodes may be reserved, e.g. for maintenance; "
        "a shorter --time may let it start",
        "Reservation": "waiting for its reservation",
        "Licenses": "waiting for licenses",
        "QOSMax|QOSJobLimit": "your limit in this QOS is reached; it waits for your other jobs",
        "QOSGrp": "all users together have reached the limit of the QOS",
        "AssocGrp|AssocMax|AssociationJobLimit": "the account's limit is reached",
    },
    False: {
        "ReservationInvalid": "its reservation is not valid; it will not start",
        "ReservationDeleted": "its reservation was deleted; it will not start",
        "DependencyNeverSatisfied": "its dependency can never be met; it will not start",
        "PartitionTimeLimit": "--time exceeds the partition's limit; it will not start",
        "PartitionNodeLimit": "requests more nodes than the partition allows; it will not start",
        "PartitionConfig": "requests what the partition does not allow",
        "BadConstraints": "no node can satisfy its request; it will not start",
        "JobHeldUser": "held by you; release it: scontrol release JOB",
        "JobHeldAdmin": "held by an administrator",
        "JobHoldMaxRequeue": "held after too many requeues; release it: scontrol release JOB",
        "launch failed requeued held": "its launch failed; release it: scontrol release JOB",
        "AccountNotAllowed|Job's account not permitted": "this partition rejects the account",
        "QOSNotAllowed|Job's QOS not permitted": "this partition rejects the QOS",
        "InvalidAccount": "the account is not valid",
        "InvalidQOS": "the QOS is not valid",
        "DeadLine": "its deadline cannot be met",
    },
    None: {
        "Constraints": "waiting for nodes with the requested features",
        "PartitionDown|PartitionInactive": "the partition is down or inactive: it starts no jobs",
        "NodeDown|Nodes required for job are DOWN": "nodes that it needs are down, drained "
        "or reserved for jobs in higher-priority partitions",
        "QOSTimeLimit": "the time budget of the QOS is used up",
        "AssocGrpBillingMin|AssocGrpCPUMin|AssocGrpGRESMin": "the account's budget is used up",
    },
}
REASONS = {
    code: (text, can_start)
    for can_start, table in _MEANINGS.items()
    for codes, text in table.items()
    for code in codes.split("|")
}


class Use(Enum):
    """What a node is used for now, whatever its kind."""

    IDLE = "idle"
    PARTLY = "partly in use"
    BUSY = "busy"
    RESERVED = "reserved"
    OUT = "down or drained"


class FactKind(str, Enum):
    """What is known about a job that waits."""

    NODES = "nodes"
    TOO_MANY_NODES = "too_many_nodes"
    TOO_LONG = "too_long"
    NODES_OUT = "nodes_out"
    RESERVATION = "reservation"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact about a job that waits; numbers are nodes or seconds."""

    kind: FactKind
    partition: str = ""
    asked: int | None = None  # what was requested
    limit: int | None = None  # what there is
    uses: tuple[tuple[Use, int], ...] = ()  # how many nodes of this kind have each use
    nodes: str = ""
    state: str = ""
    detail: str = ""  # a GPU type, the reason of a state, or the name of a reservation
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sooner:
    """What to change to start sooner; the rest is unset. `idle` nodes are free for the job now."""

    idle: int | None = None
    nodes: int | None = None
    limit_s: int | None = None
    partition: str = ""

    @property
    def kind(self) -> str:
        """What changes: `partition`, `nodes` or only `time`."""
        return "partition" if self.partition else "nodes" if self.nodes else "time"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The facts about a job that waits, and what would start sooner."""

    facts: tuple[Fact, ...] = ()
    sooner: tuple[Sooner, ...] = ()
    is_out: bool = False  # what it lacks are nodes that are down or drained


@dataclass(frozen=True, kw_only=True)
class PendingReason:
    """Why a job waits: a reason code and its meaning."""

    code: str
    text: str
    can_start: bool | None  # whether waiting is enough; None: unknown
    names_nodes: bool = False  # Slurm also named nodes that are down, drained or reserved
    is_held: bool = False  # by Slurm, after a requeue


def explain(reason: str, job_id: str) -> PendingReason:
    """Explain why a job waits; the text of an unknown code is the code.

    >>> explain("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "7").text
    'nodes down, drained or reserved: node[1-2]'
    """
    code, _, detail = (part.strip() for part in reason.partition(","))
    nodes = detail.removeprefix(UNAVAILABLE).strip() if detail.startswith(UNAVAILABLE) else ""
    if nodes:
        text = f"nodes down, drained or reserved: {nodes}"
        return PendingReason(code=code, text=text, can_start=None, names_nodes=True)
    if code not in REASONS and (limit := _LIMIT_OF_ONE.match(code)):
        kind, what, scope = limit.groups()  # of QOSMaxNodePerJob: QOS, Node, Job
        owner = "QOS" if kind == "QOS" else "account"
        more = f"requests more {_WHAT.get(what, what)} per {scope.lower()} than the {owner} allows"
        return PendingReason(code=code, text=f"{more}; it will not start", can_start=False)
    matches = [known for known in REASONS if (code or "None").startswith(known)]
    if not matches:
        return PendingReason(code=code, text=reason, can_start=None)
    text, can_start = REASONS[max(matches, key=len)]
    return PendingReason(code=code, text=text.replace("JOB", job_id), can_start=can_start)
