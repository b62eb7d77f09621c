"""The errors that clusterrun raises for people, each with its exit code and a hint."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the command line's exit status means; one table for every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO = 3
    NOT_FOUND = 4
    UNREACHABLE = 5
    INTERRUPTED = 130


class NodeExit(IntEnum):
    """Exit statuses that a node agent chooses when no rank's own status says why.

    Above the statuses that programs commonly use and below 128 + signal.
    """

    WORLD_BROKEN = 120
    RENDEZVOUS_FAILED = 121
    NODE_UNFIT = 122
    NODE_LOST = 123
    CANCELLED = 124
    INTERRUPTED = 125  # saved and left, to be continued
    HUNG = 126


class ClusterrunError(Exception):
    """A failure that the user can act on.

    `message` says what failed (lower case, no full stop), `cause` is verbatim text of the
    program below, `where` is `file:line`, and each hint says what to do next.
    """

    code = "failed"
    exit_code: Exit = Exit.FAILED

    def __init__(
        self,
        message: str,
        *,
        hint: str | tuple[str, ...] = (),
        cause: str | None = None,
        where: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hints: tuple[str, ...] = (hint,) if isinstance(hint, str) else hint
        self.cause = cause
        self.where = where


class UsageError(ClusterrunError):
    """An option, a value or a file that the user gave cannot be used."""

    code = "usage"
    exit_code = Exit.USAGE


class ConfigError(UsageError):
    """A configuration file says something that cannot be used."""

    code = "config"


class SubmissionError(ClusterrunError):
    """The scheduler refused the job."""

    code = "refused"


class JobNotFoundError(ClusterrunError):
    """No such job or run."""

    code = "job_not_found"
    exit_code = Exit.NOT_FOUND


class SchedulerUnreachableError(ClusterrunError):
    """The scheduler did not answer; the job itself is not affected."""

    code = "unreachable"
    exit_code = Exit.UNREACHABLE


class WorldContractError(ClusterrunError):
    """The ranks did not become the one world that was asked for."""

    code = "world_broken"


MESSAGE_LETTERS = 4096


def shortened(text: str, letters: int = MESSAGE_LETTERS) -> str:
    """Return a text that is passed on between processes: of a long one its beginning and its end.

    >>> shortened("a tensor of 100 numbers", 19)
    'a ten ... numbers'
    """
    half = (letters - 5) // 2
    return text if len(text) <= letters else f"{text[:half]} ... {text[-half:]}"
