"""How an attempt ends: what failed where, and which of several failures came first."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.errors import NodeExit, shortened
from clusterrun.rundir.outcome import Cause, Reason

__all__ = [
    "Cause",
    "Ending",
    "Failure",
    "NodeError",
    "NodeExit",
    "cancelled",
    "first_failure",
    "lost_node",
]


# What gloo, NCCL and torch's store say in a rank that has lost another one (torch 2.13).
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|pair closure|Broken pipe"
    r"|remote process exited|communicator was aborted|recvValue"
)


class NodeError(Exception):
    """This node can't take part; `code` is the job's exit status.

    `is_told` says that the head decided so, and tells the user.
    """

    def __init__(self, code: int, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.code = int(code)
        self.message = message
        self.is_told = is_told


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One thing that went wrong; `at` is epoch seconds, `rank` is None where no rank is to blame.

    `code` is what the job's exit status would be; `signal` is 0 where none killed the rank.
    `where` is the place in the user's code that raised an exception, as `train.py:120`.
    """

    at: float
    node: str
    rank: int | None
    code: int
    signal: int
    cause: Cause
    message: str
    where: str = ""

    def __post_init__(self) -> None:
        """Bound the message and make it text in UTF-8: it goes through the link and into files."""
        text = shortened(self.message).encode(errors="replace").decode()
        object.__setattr__(self, "message", text)

    @property
    def is_consequence(self) -> bool:
        """Say whether something else must have come before, as when a launcher ended this rank."""
        is_passed_on = self.cause in (Cause.LAUNCHER, Cause.WORLD_ELSEWHERE)
        return self.signal == signal.SIGTERM or is_passed_on or self.has_lost_peer

    @property
    def has_lost_peer(self) -> bool:
        """Say whether the rank failed since another one was gone."""
        return self.cause is Cause.EXCEPTION and bool(_LOST_PEER.search(self.message))

    def to_data(self) -> dict[str, Any]:
        """Write the failure as JSON data."""
        return {**dataclasses.asdict(self), "cause": self.cause.value}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Failure:
        """Read what `to_data` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: data[name] for name in names if name != "where"}
        values["where"] = str(data.get("where", ""))
        return cls(**{**values, "cause": Cause(data["cause"]), "code": int(data["code"])})

    def sentence(self) -> str:
        """Say in one line who failed and how."""
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else self.node
        return f"{who}: {self.message}"


def lost_node(node: str, message: str) -> Failure:
    """Describe a node whose agent is gone, as of now."""
    return _of_node(node, NodeExit.NODE_LOST, Cause.NODE_LOST, message)


def cancelled(node: str) -> Failure:
    """Describe that somebody wants the job to end, as of now."""
    return _of_node(node, NodeExit.CANCELLED, Cause.CANCELLED, "cancelled")


def _of_node(node: str, code: NodeExit, cause: Cause, message: str) -> Failure:
    return Failure(
        at=time.time(),
        node=node,
        rank=None,
        code=int(code),
        signal=0,
        cause=cause,
        message=message,
    )


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Choose the failure that came first, consequences last; there must be one.

    Slurm ends the other tasks when one is gone, and its SIGTERM may be here before the news: next
    to a lost node a cancellation is a consequence, too.
    """
    given = list(failures)
    is_node_lost = any(failure.cause is Cause.NODE_LOST for failure in given)

    def order(failure: Failure) -> tuple[bool, bool, float]:
        after_loss = is_node_lost and failure.cause is Cause.CANCELLED
        return failure.is_consequence, after_loss, failure.at

    return min(given, key=order)


_CAUSES: Mapping[int, Cause] = {
    NodeExit.RENDEZVOUS_FAILED: Cause.RENDEZVOUS,
    NodeExit.NODE_UNFIT: Cause.NODE_UNFIT,
    NodeExit.NODE_LOST: Cause.NODE_LOST,
    NodeExit.CANCELLED: Cause.CANCELLED,
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of an attempt on all nodes: its exit status and why.

    `alike` counts the ranks whose script failed at the same place, as far as they had time to say
    so; those that lost another rank there did not fail by themselves.
    """

    code: int
    reason: str
    failure: Failure | None = None
    alike: int = 0
    cause: Cause = Cause.COMPLETED
    interruption: Reason | None = None

    @classmethod
    def of(cls, failure: Failure) -> Ending:
        """End because of a failure."""
        reason = failure.sentence()
        return cls(code=failure.code, reason=reason, failure=failure, cause=failure.cause)

    @classmethod
    def refused(cls, error: NodeError) -> Ending:
        """End before the launch."""
        cause = _CAUSES.get(error.code, Cause.EXIT)
        return cls(code=error.code, reason=error.message, cause=cause)

    @classmethod
    def completed(cls) -> Ending:
        """End well."""
        return cls(code=0, reason="completed")

    @classmethod
    def of_first(cls, failures: Sequence[Failure]) -> Ending:
        """End because of what came first of several failures."""
        first = first_failure(failures)
        is_by_script = first.cause in (Cause.EXCEPTION, Cause.EXIT) and first.where
        own = [f for f in failures if not f.is_consequence]
        alike = [f for f in own if (f.cause, f.where) == (first.cause, first.where)]
        count = len(alike) if is_by_script else 0
        return dataclasses.replace(cls.of(first), alike=count)

    def to_data(self) -> dict[str, Any]:
        """Write the ending as JSON data."""
        failure = self.failure.to_data() if self.failure else None
        about = {"code": self.code, "reason": self.reason, "failure": failure}
        about |= {"alike": self.alike, "cause": self.cause.value}
        return {**about, "interruption": self.interruption.value if self.interruption else None}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Ending:
        """Read what `to_data` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        failure = Failure.from_data(data["failure"]) if data.get("failure") else None
        interruption = data.get("interruption")
        return cls(
            code=int(data["code"]),
            reason=str(data["reason"]),
            failure=failure,
            alike=int(data.get("alike", 0)),
            cause=Cause(data.get("cause", Cause.COMPLETED)),
            interruption=Reason(interruption) if interruption else None,
        )
