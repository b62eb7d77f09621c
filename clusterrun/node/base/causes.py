"""How an attempt ends: what failed where, and which of several failures came first."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterrun.errors import NodeExit as NodeExit
from clusterrun.errors import shortened
from clusterrun.rundir.end import Cause as Cause
from clusterrun.rundir.end import Reason


class NodeError(Exception):
    """This node can't take part; without a `cause`, the code shows it."""

    def __init__(
        self, code: int, message: str, *, is_told: bool = False, cause: Cause | None = None
    ) -> None:
        super().__init__(message)
        self.code = int(code)  # the job's exit status
        self.message = message
        self.is_told = is_told  # the conductor has decided this and reports it to the user
        self.cause = cause or _CAUSES.get(self.code, Cause.EXIT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure."""

    at: float = field(default_factory=time.time)  # in epoch seconds
    node: str
    rank: int | None = None  # None if no rank is to blame
    code: int  # the job's resulting exit status
    signal: int = 0  # 0 if no signal killed the rank
    cause: Cause
    message: str
    where: str = ""  # the place in the user's code that raised, as `train.py:120`
    has_lost_peer: bool = False  # it raised because another rank was gone

    def __post_init__(self) -> None:
        """Shorten the message and make it valid UTF-8, for the link and for files."""
        text = shortened(self.message).encode(errors="replace").decode()
        object.__setattr__(self, "message", text)

    @property
    def is_consequence(self) -> bool:
        """Return whether another failure came first, as when a launcher ended this rank."""
        is_from_elsewhere = self.cause in (Cause.LAUNCHER, Cause.WORLD_ELSEWHERE)
        return self.signal == signal.SIGTERM or is_from_elsewhere or self.has_lost_peer

    def sentence(self) -> str:
        """Return who failed and how, in one line; a cancellation is no node's failure."""
        if self.cause is Cause.CANCELLED:
            return self.message
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else self.node
        return f"{who}: {self.message}"


def lost_node(node: str, message: str) -> Failure:
    """Return the failure of a node whose agent is now gone."""
    return Failure(node=node, code=int(NodeExit.NODE_LOST), cause=Cause.NODE_LOST, message=message)


def cancelled(node: str) -> Failure:
    """Return the failure of a job that is now cancelled."""
    code = int(NodeExit.CANCELLED)
    return Failure(node=node, code=code, cause=Cause.CANCELLED, message="cancelled")


_CAUSES: Mapping[int, Cause] = {
    NodeExit.RENDEZVOUS_FAILED: Cause.RENDEZVOUS,
    NodeExit.NODE_UNFIT: Cause.NODE_UNFIT,
    NodeExit.NODE_LOST: Cause.NODE_LOST,
    NodeExit.CANCELLED: Cause.CANCELLED,
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of an attempt on all nodes: its exit status and why."""

    code: int
    reason: str
    failure: Failure | None = None
    # Ranks that reported in time a failure at the same place, without those that lost a rank.
    alike: int = 0
    cause: Cause = Cause.COMPLETED
    interruption: Reason | None = None
    is_handled: bool = False  # see Outcome

    @classmethod
    def of(cls, failure: Failure) -> Ending:
        """Return the ending that a failure causes."""
        reason = failure.sentence()
        return cls(code=failure.code, reason=reason, failure=failure, cause=failure.cause)

    @classmethod
    def refused(cls, error: NodeError) -> Ending:
        """Return the ending that an error before the launch causes."""
        return cls(code=error.code, reason=error.message, cause=error.cause)

    @classmethod
    def completed(cls) -> Ending:
        """Return the ending of a success."""
        return cls(code=0, reason="completed")

    @classmethod
    def of_first(cls, failures: Sequence[Failure]) -> Ending:
        """Return the ending of the earliest failure, and count those alike; consequences come last.

        If a node is lost, a cancellation is also a consequence: Slurm ends the other tasks, and its
        SIGTERM may arrive before the loss is reported.
        """
        is_node_lost = any(failure.cause is Cause.NODE_LOST for failure in failures)

        def order(failure: Failure) -> tuple[bool, bool, float]:
            is_due_to_loss = is_node_lost and failure.cause is Cause.CANCELLED
            return failure.is_consequence, is_due_to_loss, failure.at

        first = min(failures, key=order)
        has_place = first.cause in (Cause.EXCEPTION, Cause.EXIT) and first.where
        origins = [(f.cause, f.where) for f in failures if not f.is_consequence]
        alike = origins.count((first.cause, first.where)) if has_place else 0
        return dataclasses.replace(cls.of(first), alike=alike)


# A warning before the end

EARLY_S = 120.0  # Slurm warns up to a minute early, and the ranks need time to exit


def warning_reason(left_s: float, warning_s: float) -> Reason:
    """Return whether a warning is Slurm's or a person's signal, by the time left."""
    return Reason.TIME_LIMIT if left_s <= warning_s + EARLY_S else Reason.SIGNAL


def time_left_s(env: Mapping[str, str], now: float) -> float | None:
    """Return the job's time left in seconds; None if Slurm does not report it."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return int(end) - now if end.isdigit() else None
