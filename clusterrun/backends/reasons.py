"""Why a job waits, in plain words: Slurm's reason codes."""

from __future__ import annotations

from dataclasses import dataclass

UNAVAILABLE = "UnavailableNodes:"
QOS_FULL = "your limit in this QOS is used up; it starts when jobs of yours end"
ACCOUNT_FULL = "the limit of the account is used up"
NEVER_NODES = "asks for more nodes than the partition allows; it will not start"

# Code: (words, may it start without anybody doing something). Longest beginning wins.
REASONS: dict[str, tuple[str, bool | None]] = {
    "Resources": ("waiting for free nodes", True),
    "Priority": ("jobs with higher priority are ahead", True),
    "None": ("the scheduler has not looked at it yet", True),
    "Dependency": ("waiting for another job", True),
    "DependencyNeverSatisfied": ("can never start: the job it waits for failed", False),
    "BeginTime": ("its start time has not come", True),
    "Licenses": ("waiting for a licence", True),
    "Prolog": ("the nodes are being prepared", True),
    "Cleaning": ("its last start is being cleaned up", True),
    "ReqNodeNotAvail": (
        "nodes are reserved, for maintenance perhaps; a shorter --time may start it",
        True,
    ),
    "Reservation": ("waiting for its reservation", True),
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
    "QOSMaxNodePerJobLimit": ("asks for more nodes than the QOS allows", False),
    "QOSMaxGRESPerJob": ("asks for more GPUs than the QOS allows", False),
    "QOSMax": (QOS_FULL, True),
    "QOSGrp": ("the limit of the QOS is used up, by everybody together", True),
    "QOSMinGRES": ("asks for fewer GPUs than the QOS demands", False),
    "QOSUsageThreshold": ("usage is over the threshold of the QOS", True),
    "QOSJobLimit": (QOS_FULL, True),
    "QOSResourceLimit": (QOS_FULL, True),
    "AssocMaxWallDurationPerJobLimit": ("--time exceeds the limit of the account", False),
    "AssocMaxNodePerJobLimit": ("asks for more nodes than the account allows", False),
    "AssocMaxGRESPerJob": ("asks for more GPUs than the account allows", False),
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
    """A reason code, its meaning, and whether the job can start by itself (None: not known)."""

    code: str
    text: str
    can_start: bool | None


def explain(reason: str) -> PendingReason:
    """Put the reason for which a job waits into words; a code without words is its own.

    >>> explain("ReqNodeNotAvail, UnavailableNodes:node[1-2]").text
    'node[1-2] is down, drained or reserved'
    """
    code, _, detail = (part.strip() for part in reason.partition(","))
    nodes = detail.removeprefix(UNAVAILABLE).strip() if detail.startswith(UNAVAILABLE) else ""
    if nodes:
        text = f"{nodes} is down, drained or reserved"
        return PendingReason(code=code, text=text, can_start=None)
    text, can_start = _known(code or "None")
    return PendingReason(code=code, text=text, can_start=can_start)


def _known(code: str) -> tuple[str, bool | None]:
    matches = [known for known in REASONS if code.startswith(known)]
    return REASONS[max(matches, key=len)] if matches else (code, None)
