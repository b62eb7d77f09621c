"""Slurm's reason codes in plain words: why a job waits."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNAVAILABLE = "UnavailableNodes:"
QOS_FULL = "your limit in this QOS is used up; it starts when jobs of yours end"
ACCOUNT_FULL = "the limit of the account is used up"
# A limit on one job, or on its share of one node: waiting does not help.
_OF_ONE = re.compile(r"(QOS|Assoc)Max(\w+?)Per(Job|Node)(?:Limit)?$")
_WHAT = {"Cpu": "CPUs", "GRES": "GPUs", "Mem": "memory", "Memory": "memory", "Node": "nodes"}
NEVER_NODES = "asks for more nodes than the partition allows; it will not start"

# Code: (words, whether waiting is enough). The longest prefix counts.
REASONS: dict[str, tuple[str, bool | None]] = {
    "Resources": ("waiting for free nodes", True),
    "Priority": ("jobs with higher priority are ahead", True),
    "None": ("the scheduler has not looked at it yet", True),
    "Dependency": ("waiting for another job", True),
    "DependencyNeverSatisfied": ("can never start: the job it waits for failed", False),
    "BeginTime": ("its start time has not come", True),
    "Licenses": ("waiting for a licence", True),
    "Prolog": ("the nodes are being prepared", True),
    "NvidiaImexChannels": ("waiting for a free NVIDIA IMEX channel", True),
    "MpiPortsBusy": ("waiting for free MPI ports", True),
    "MaxPoweredUpNodes": ("the cluster keeps no more nodes powered up at a time", True),
    "SchedDefer": ("the scheduler will look at it in its next full round", True),
    "Constraints": ("waiting for nodes with the features it asks for", None),
    "Cleaning": ("its last start is being cleaned up", True),
    "ReqNodeNotAvail": (
        "nodes are reserved, for maintenance perhaps; a shorter --time may start it",
        True,
    ),
    "Reservation": ("waiting for its reservation", True),
    "ReservationInvalid": ("its reservation is not valid; it will not start", False),
    "ReservationDeleted": ("its reservation was deleted; it will not start", False),
    "PartitionTimeLimit": ("--time exceeds the partition's limit; it will not start", False),
    "PartitionNodeLimit": (NEVER_NODES, False),
    "PartitionConfig": ("asks for what the partition does not allow", False),
    "PartitionDown": ("the partition takes no jobs to its nodes now", None),
    "PartitionInactive": ("the partition starts no jobs now", None),
    "NodeDown": ("a node that it needs is down", None),
    "BadConstraints": ("no node can satisfy what it asks for; it will not start", False),
    "JobHeldUser": ("held by you; release it: scontrol release JOB", False),
    "JobHeldAdmin": ("held by an administrator", False),
    "JobHoldMaxRequeue": ("held after too many requeues; release it: scontrol release JOB", False),
    "launch failed requeued held": ("its start failed; release it: scontrol release JOB", False),
    "JobArrayTaskLimit": ("as many tasks of its array run as may", True),
    "FrontEndDown": ("the front end is down", None),
    "AccountNotAllowed": ("the account may not use this partition", False),
    "QOSNotAllowed": ("the QOS may not be used here", False),
    "InvalidAccount": ("the account is not valid", False),
    "InvalidQOS": ("the QOS is not valid", False),
    "QOSTimeLimit": ("the time budget of the QOS is used up", None),
    "QOSMaxWallDurationPerJobLimit": ("--time exceeds the limit of the QOS", False),
    "QOSMax": (QOS_FULL, True),
    "QOSGrp": ("the limit of the QOS is used up, by everybody together", True),
    "QOSMinGRES": ("asks for fewer GPUs than the QOS demands", False),
    "QOSUsageThreshold": ("usage is over the threshold of the QOS", True),
    "QOSJobLimit": (QOS_FULL, True),
    "QOSResourceLimit": (QOS_FULL, True),
    "AssocMaxWallDurationPerJobLimit": ("--time exceeds the limit of the account", False),
    "AssocGrpBillingMinutes": ("the account's budget is used up", None),
    "AssocGrpCPUMinutesLimit": ("the account's budget is used up", None),
    "AssocGrpGRESMinutes": ("the account's budget is used up", None),
    "AssocGrp": (ACCOUNT_FULL, True),
    "AssocMax": (ACCOUNT_FULL, True),
    "AssociationJobLimit": (ACCOUNT_FULL, True),
    "AssociationResourceLimit": (ACCOUNT_FULL, True),
    "MaxGRESPerAccount": (ACCOUNT_FULL, True),
    "MaxCpuPerAccount": (ACCOUNT_FULL, True),
    "DeadLine": ("its deadline cannot be met", False),
}


@dataclass(frozen=True, kw_only=True)
class PendingReason:
    """A reason code, its meaning, and whether waiting is enough (None: not known)."""

    code: str
    text: str
    can_start: bool | None


def explain(reason: str, job_id: str) -> PendingReason:
    """Explain why a job waits; an unknown code is returned as it is.

    >>> explain("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "7").text
    'node[1-2] is down, drained or reserved'
    """
    code, _, detail = (part.strip() for part in reason.partition(","))
    nodes = detail.removeprefix(UNAVAILABLE).strip() if detail.startswith(UNAVAILABLE) else ""
    if nodes:
        text = f"{nodes} is down, drained or reserved"
        return PendingReason(code=code, text=text, can_start=None)
    text, can_start = _known(code or "None")
    return PendingReason(code=code, text=text.replace("JOB", job_id), can_start=can_start)


def _known(code: str) -> tuple[str, bool | None]:
    if code not in REASONS and (limit := _OF_ONE.match(code)):
        owner, what, scope = limit[1], _WHAT.get(limit[2], limit[2]), limit[3].lower()
        source = "QOS" if owner == "QOS" else "account"
        return (
            f"asks for more {what} per {scope} than the {source} allows; it will not start",
            False,
        )
    matches = [known for known in REASONS if code.startswith(known)]
    return REASONS[max(matches, key=len)] if matches else (code, None)
