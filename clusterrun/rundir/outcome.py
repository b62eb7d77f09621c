"""How an attempt ended and what follows, how a run did, and requests to interrupt an attempt.

The rule book, `status` and `resume` use the fields of outcome.json; its texts are for people only.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterrun.diagnosis.kinds import Advice, Certainty, Retry, Suspicion
from clusterrun.errors import NodeExit
from clusterrun.rundir import reading
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
END_SCHEMA = "clusterrun.end/1"
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


class Cause(str, Enum):
    """The kind of a failure, or of another end."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    WORLD = "world"
    WORLD_ELSEWHERE = "world_elsewhere"  # broken on a different node than the one that noticed
    ENGINE = "engine"  # the ranks would train with a different engine than requested
    LAUNCHER = "launcher"
    NODE_LOST = "node_lost"
    VANISHED = "vanished"  # no agent could write an outcome: the batch host was lost
    NODE_UNFIT = "node_unfit"
    PREFLIGHT = "preflight"  # a check of a node failed, and the launch waits for no such node
    RENDEZVOUS = "rendezvous"
    CANCELLED = "cancelled"
    HUNG = "hung"
    HALTED = "halted"  # hung without running: stopped, or blocked in the kernel
    INTERRUPTED = "interrupted"  # the ranks were to save and exit
    COMPLETED = "completed"

    @property
    def is_failure(self) -> bool:
        """Return whether something went wrong."""
        return self not in (Cause.COMPLETED, Cause.INTERRUPTED, Cause.CANCELLED)


class Reason(str, Enum):
    """Why an attempt is interrupted: the word in its `request`."""

    END = "end"
    CANCEL = "cancel"
    TIME_LIMIT = "time-limit"
    PREEMPT = "preempt"
    SIGNAL = "signal"  # the warning signal of the time limit, when the limit is not near

    @property
    def text(self) -> str:
        """The reason for people."""
        return _TEXTS[self]


_TEXTS = {
    Reason.END: "cancelled",
    Reason.CANCEL: "cancelled, after a checkpoint",
    Reason.TIME_LIMIT: "the time limit",
    Reason.PREEMPT: "preempted",
    Reason.SIGNAL: "asked to save and exit by SIGUSR2",
}


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
        return JobState.TIMEOUT if self.code == NodeExit.INTERRUPTED else JobState.CANCELLED

    def to_json(self) -> str:
        """Return the text of `outcome.json`."""
        return reading.as_text(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Parse the result of `to_json`. Raises ValueError for others."""
        return typed.of_schema(cls, files.parse_object(text) or {}, SCHEMA)


def hints_of(outcome: Outcome | None, verdict: ShortVerdict | None) -> list[str]:
    """Return what a rank said to do as it broke off, if its world or engine is the cause."""
    if outcome is None or outcome.cause not in (Cause.WORLD, Cause.WORLD_ELSEWHERE, Cause.ENGINE):
        return []  # any other message is the script's
    if verdict is None or verdict.cause != "world_size_not_joined":
        return []
    lines = [line for line in outcome.message.splitlines() if line.startswith(HINT)]
    # The last hint only switches the check off.
    return [line.removeprefix(HINT) for line in lines] if len(lines) > 1 else []


def read_outcome(paths: RunPaths, attempt: int) -> Outcome | None:
    """Read how an attempt ended; None if the file is missing or damaged."""
    return reading.read(paths.outcome(attempt), Outcome, SCHEMA)


def write_outcome(paths: RunPaths, outcome: Outcome) -> None:
    """Write how an attempt ended."""
    files.write_whole(paths.outcome(outcome.attempt), outcome.to_json())


@dataclass(frozen=True, kw_only=True)
class End:
    """How the newest attempt ended."""

    state: JobState
    exit_code: int | None = None
    ended_at: float | None = None


def write_end(paths: RunPaths, state: JobState, exit_code: int) -> None:
    """Write end.json atomically, readable by its owner only. Raises OSError."""
    end = End(state=state, exit_code=exit_code, ended_at=time.time())
    files.write_whole(paths.end, reading.as_text(end, END_SCHEMA))


def read_end(paths: RunPaths) -> End | None:
    """Read end.json; None if it is missing, damaged or older than the newest attempt."""
    begun_ns = 0
    with contextlib.suppress(OSError):
        begun_ns = paths.attempts_dir.stat().st_mtime_ns
    with contextlib.suppress(OSError):
        is_newer = paths.end.stat().st_mtime_ns >= begun_ns  # both times are the file server's
        # A copy of a run has other times.
        if is_newer or paths.outcome(paths.newest_attempt()).exists():
            return reading.read(paths.end, End, END_SCHEMA)
    return None


# Requests in an attempt's directory: to interrupt it (one word in `request`), and to show where its
# ranks are (the files `look-<id>.fr`)


def read_request(path: Path) -> Reason | None:
    """Return why an attempt is to be interrupted; None if there is no request."""
    try:
        return Reason(files.read_whole(path).decode("ascii").strip())
    except (OSError, ValueError):
        return None


def write_request(path: Path, reason: Reason) -> None:
    """Request an interruption; the first request is kept, but END replaces any other."""
    write = files.write_whole if reason is Reason.END else files.create
    with contextlib.suppress(OSError):  # FileExistsError: another request was first
        write(path, f"{reason.value}\n")


def request_look(directory: Path) -> Path:
    """Request a look at the ranks; return the request's path. Raises OSError."""
    (path := directory / f"look-{secrets.token_hex(4)}.fr").touch(mode=0o600)
    return path


def requests(directory: Path) -> list[Path]:
    """List the requests in an attempt's directory."""
    return sorted(directory.glob("look-*.fr"))


def answer_path(request: Path) -> Path:
    """Return where a request is answered."""
    return request.with_suffix(".json")
