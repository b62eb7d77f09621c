"""How an attempt ends: what failed where, and which of several failures came first."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterrun.errors import NodeExit as NodeExit
from clusterrun.errors import shortened
from clusterrun.rundir.outcome import Cause as Cause
from clusterrun.rundir.outcome import Reason


class NodeError(Exception):
    """This node can't take part; `code` is the job's exit status.

    If the head decided so (`is_told`), it reports it to the user as well.
    """

    def __init__(self, code: int, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.code = int(code)
        self.message = message
        self.is_told = is_told


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One thing that went wrong; `at` is epoch seconds, `rank` is None if no rank is to blame.

    `code` is what the job's exit status would be; `signal` is 0 if none killed the rank. `where`
    is the place in the user's code that raised an exception, as `train.py:120`. `has_lost_peer`
    says that it was raised because another rank was gone.
    """

    at: float = field(default_factory=time.time)
    node: str
    rank: int | None = None
    code: int
    signal: int = 0
    cause: Cause
    message: str
    where: str = ""
    has_lost_peer: bool = False

    def __post_init__(self) -> None:
        """Bound the message and make it text in UTF-8: it goes through the link and into files."""
        text = shortened(self.message).encode(errors="replace").decode()
        object.__setattr__(self, "message", text)

    @property
    def is_consequence(self) -> bool:
        """Whether something else must have come first, as when a launcher ended this rank."""
        is_passed_on = self.cause in (Cause.LAUNCHER, Cause.WORLD_ELSEWHERE)
        return self.signal == signal.SIGTERM or is_passed_on or self.has_lost_peer

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Failure:
        """Undo `asdict`. Raises KeyError, TypeError or ValueError for anything else."""
        values = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**values, "cause": Cause(data["cause"]), "code": int(data["code"])})

    def sentence(self) -> str:
        """Return who failed and how, in one line."""
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else self.node
        return f"{who}: {self.message}"


def lost_node(node: str, message: str) -> Failure:
    """Describe a node whose agent is gone, as of now."""
    code = int(NodeExit.NODE_LOST)
    return Failure(node=node, code=code, cause=Cause.NODE_LOST, message=message)


def cancelled(node: str) -> Failure:
    """Describe that somebody ends the job, as of now."""
    code = int(NodeExit.CANCELLED)
    return Failure(node=node, code=code, cause=Cause.CANCELLED, message="cancelled")


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that came first, consequences last; there must be one.

    Next to a lost node a cancellation is a consequence, too: Slurm ends the other tasks when one
    is gone, and its SIGTERM may arrive before the news.
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

    `alike` counts the ranks whose script failed at the same place, as far as they could report
    it in time; those that lost another rank there do not count.
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
        """End because of the first of several failures."""
        first = first_failure(failures)
        is_by_script = first.cause in (Cause.EXCEPTION, Cause.EXIT) and first.where
        own = [f for f in failures if not f.is_consequence]
        alike = [f for f in own if (f.cause, f.where) == (first.cause, first.where)]
        count = len(alike) if is_by_script else 0
        return dataclasses.replace(cls.of(first), alike=count)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Ending:
        """Undo `asdict`. Raises KeyError, TypeError or ValueError for anything else."""
        failure, interruption = data.get("failure"), data.get("interruption")
        return cls(
            code=int(data["code"]),
            reason=str(data["reason"]),
            failure=Failure.from_data(failure) if failure else None,
            alike=int(data.get("alike", 0)),
            cause=Cause(data.get("cause", Cause.COMPLETED)),
            interruption=Reason(interruption) if interruption else None,
        )
