"""How an attempt ended, and what follows.

The rule book, `status` and `resume` use the fields of outcome.json; its texts are for people only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from clusterrun.diagnosis.kinds import Advice, Certainty, Retry, Suspicion
from clusterrun.errors import NodeExit
from clusterrun.rundir import reading
from clusterrun.rundir.end import Cause, Reason
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files, typed
from clusterrun.shared.state import JobState


@dataclass(frozen=True, kw_only=True)
class ShortVerdict:
    """A cause and where it began."""

    cause: str  # its id
    means: str  # a sentence
    status: Certainty
    retry: Retry
    text: str = ""  # its first sign
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    blames_node: bool = False
    generic: bool = False  # it only says that the script failed
    steps: int = 0  # that the log shows before it
    advice: tuple[Advice, ...] = ()  # general
    place: str = ""  # who printed the text
    frame: str = ""  # the line of the script in its traceback
    more: tuple[str, ...] = ()  # further signs
    is_reported: bool = False  # the first sign is from the agents
    victims: int = 0  # how many other ranks failed because of it
    allowed: int | None = None  # what the job may use of the memory of its nodes


SCHEMA = "clusterrun.outcome/1"
HINT = "hint: "  # begins a line of a message


class Next(str, Enum):
    """What follows an attempt."""

    RELAUNCH = "relaunch"  # immediately, in the same allocation
    REQUEUE = "requeue"  # the same job, from the queue
    SUCCESSOR = "successor"  # another job of the same run
    STOP = "stop"


class VerdictRule(str, Enum):
    """The rule on verdicts that decided what follows an attempt."""

    WOULD_REPEAT = "would-repeat"  # an error that another try would repeat stops the run
    SAME_CAUSE = "same-cause"  # so does the second failure in a row by one cause at one place
    FAULTY_NODE = "faulty-node"  # a faulty node is excluded


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt; times are epoch seconds."""

    attempt: int
    job_id: str
    started_at: float
    ended_at: float
    nodes: tuple[str, ...]
    code: int  # the job's exit status if it ends here
    cause: Cause
    reason: str  # the whole sentence
    interruption: Reason | None = None  # why the ranks were to exit
    is_handled: bool = False  # the script's own handlers ended them; their saves may be unknown
    node: str | None = None  # of the first failure, as are the rank, the place and the signal
    rank: int | None = None
    where: str | None = None  # file:line
    signal: int = 0  # that killed the rank; 0: none
    message: str = ""  # the error of the rank
    alike: int = 0  # the number of ranks that raised the same error there
    step: int | None = None  # the last one that rank 0 reported
    checkpoint: int | None = None  # the newest complete one of this or an earlier attempt
    next: Next = Next.STOP
    why: str = ""  # explains `next` in one line
    exclude: tuple[str, ...] = ()  # nodes that the next attempt must not use
    unfit: tuple[str, ...] = ()  # they failed a check before the launch for reasons of their own
    failed_at: float | None = None  # the time of the first failure
    verdict: ShortVerdict | None = None  # what the logs show as the cause
    rule: VerdictRule | None = None  # which decided what follows, if one did
    suspicions: tuple[Suspicion, ...] = ()  # why it may have trained nothing despite status 0

    @property
    def state(self) -> JobState:
        """The job's state if it ends here; by cause, since a script may exit with our statuses."""
        if self.code == 0:
            return JobState.COMPLETED
        if self.cause not in (Cause.CANCELLED, Cause.INTERRUPTED):
            return JobState.FAILED
        is_to_resume = self.code == NodeExit.INTERRUPTED  # as at the time limit or a preemption
        return JobState.TIMEOUT if is_to_resume else JobState.CANCELLED

    def to_json(self) -> str:
        """Return the text of `outcome.json`."""
        return reading.as_text(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Parse the result of `to_json`. Raises ValueError for others."""
        return typed.of_schema(cls, files.parse_object(text) or {}, SCHEMA)


def hints_of(outcome: Outcome | None, verdict: ShortVerdict | None) -> list[str]:
    """Return the hints in the error of a rank that found its world or its engine to be wrong."""
    if outcome is None or outcome.cause not in (Cause.WORLD, Cause.WORLD_ELSEWHERE, Cause.ENGINE):
        return []  # any other message is the script's
    if verdict is None or verdict.cause != "world_size_not_joined":
        return []  # the logs show another cause, or none
    lines = [line for line in outcome.message.splitlines() if line.startswith(HINT)]
    # A single hint is the last one, which only says how to switch the check off.
    return [line.removeprefix(HINT) for line in lines] if len(lines) > 1 else []


def read_outcome(paths: RunPaths, attempt: int) -> Outcome | None:
    """Read how an attempt ended; None if the file is missing or damaged."""
    return reading.read(paths.outcome(attempt), Outcome, SCHEMA)


def write_outcome(paths: RunPaths, outcome: Outcome) -> None:
    """Write how an attempt ended."""
    files.write_whole(paths.outcome(outcome.attempt), outcome.to_json())
