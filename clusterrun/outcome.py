"""How an attempt ended and what comes next: `attempts/<n>/outcome.json`, one for each attempt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterrun.errors import NodeExit
from clusterrun.state import JobState

SCHEMA = "clusterrun.outcome/1"


class Next(str, Enum):
    """What follows an attempt."""

    RELAUNCH = "relaunch"  # at once, in the same allocation
    REQUEUE = "requeue"  # the same job, from the queue
    SUCCESSOR = "successor"  # another job of the same run
    STOP = "stop"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt.

    Times are seconds of the epoch, `code` is the exit status of the job if it ended here. `cause`
    is that of the `failed` event, or `interrupted`, or `completed`. `node`, `rank` and `where`
    (file:line) name who failed first, `alike` how many ranks raised the same there. `step` is the
    last that rank 0 reported, `checkpoint` the newest step that is complete on disk, of this
    attempt or of one before. `exclude` are the nodes that the next attempt leaves out, `why` says
    in one line what decided on `next`.
    """

    attempt: int
    job_id: str
    started_at: float
    ended_at: float
    nodes: tuple[str, ...]
    code: int
    cause: str
    reason: str
    node: str | None = None
    rank: int | None = None
    where: str | None = None
    alike: int = 0
    step: int | None = None
    checkpoint: int | None = None
    next: Next = Next.STOP
    why: str = ""
    exclude: tuple[str, ...] = ()

    @property
    def state(self) -> JobState:
        """How the job ends if it ends here; a status may also be one that the script chose."""
        if self.code == 0:
            return JobState.COMPLETED
        if self.cause not in ("cancelled", "interrupted"):
            return JobState.FAILED
        return JobState.TIMEOUT if self.code == NodeExit.INTERRUPTED else JobState.CANCELLED

    def to_json(self) -> str:
        """Write the outcome as `outcome.json`."""
        data = {"schema": SCHEMA, **dataclasses.asdict(self), "next": self.next.value}
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        data: Mapping[str, Any] = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"an outcome of schema {data['schema']!r}")
        names = [field.name for field in dataclasses.fields(cls) if field.name in data]
        values = {name: data[name] for name in names}
        values |= {"next": Next(data["next"]), "nodes": tuple(data["nodes"])}
        return cls(**{**values, "exclude": tuple(data["exclude"])})
