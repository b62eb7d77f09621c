"""The errors that clusterrun reports to people, each with an exit status and hints."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class Exit(IntEnum):
    """The exit statuses of all commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO = 3
    NOT_FOUND = 4
    UNREACHABLE = 5
    INTERRUPTED = 130


class NodeExit(IntEnum):
    """The exit statuses of a node agent if no rank's status shows the cause.

    They are above those that programs commonly use, and below 128 + signal.
    """

    WORLD_BROKEN = 120
    RENDEZVOUS_FAILED = 121
    NODE_UNFIT = 122
    NODE_LOST = 123
    CANCELLED = 124
    INTERRUPTED = 125  # saved and stopped, to be resumed
    HUNG = 126


class ClusterrunError(Exception):
    """A failure that the user can act on.

    `message` names the failure (lower case, no full stop); `cause` quotes the program that failed;
    `where` is `file:line`; each hint is a next step.
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

    @property
    def hint(self) -> str:
        """All hints, one per line."""
        return "\n".join(self.hints)


class UsageError(ClusterrunError):
    """An option, value or file from the user cannot be used."""

    code = "usage"
    exit_code = Exit.USAGE


class ConfigError(UsageError):
    """The contents of a configuration file cannot be used."""

    code = "config"


class SubmissionError(ClusterrunError):
    """The scheduler refused the job."""

    code = "refused"


class JobNotFoundError(ClusterrunError):
    """The job or run does not exist."""

    code = "job_not_found"
    exit_code = Exit.NOT_FOUND


class ElsewhereError(ClusterrunError):
    """The run directory is on another host; the command line runs its command there, with `python`.

    `runs` are the run directories there, by the words that name them here ("" for none). The
    command there finds them in `VARIABLE`, as JSON.
    """

    VARIABLE = "CLUSTERRUN_FORWARDED"
    code = "elsewhere"

    def __init__(self, host: str, python: str, runs: Mapping[str, str], job: str) -> None:
        super().__init__(
            f"the run directory of job {job} is on {host}",
            hint=f"use the command line, which asks {host}: clusterrun status {job}",
        )
        self.host, self.python, self.runs, self.job = host, python, runs, job


class NotAdoptedError(ClusterrunError):
    """Only job.json says that a run is on another host: this user has not submitted it there."""

    code = "elsewhere"


class SchedulerUnreachableError(ClusterrunError):
    """The scheduler or host did not answer; the job itself is not affected."""

    code = "unreachable"
    exit_code = Exit.UNREACHABLE


def describe(error: Exception) -> str:
    """Return an error and its cause on one line."""
    cause = getattr(error, "cause", "") or ""
    return ": ".join(filter(None, (str(error), " ".join(cause.split()))))


MESSAGE_LETTERS = 4096


def shortened(text: str, letters: int = MESSAGE_LETTERS) -> str:
    """Return a text for another process; only the beginning and end if it is long.

    >>> shortened("a tensor of 100 numbers", 19)
    'a tenso ... numbers'
    """
    half = (letters - 5) // 2
    return text if len(text) <= letters else f"{text[:half]} ... {text[-half:]}"
