"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """The result of a check: a note may harm a job, a failure will."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check's result; `hint` is a command or an edit, for a note or a failure."""

    id: str
    status: Status
    text: str
    hint: str = ""


Look = Callable[[], Check]  # may raise UnknownError, OSError or ClusterrunError


class UnknownError(Exception):
    """A check cannot look; the text is the reason."""


def ok(name: str, text: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(id=name, status=Status.OK, text=text)


def skip(name: str, reason: str) -> Check:
    """Return a check that could not look."""
    return Check(id=name, status=Status.SKIP, text=reason)


def note(name: str, text: str, hint: str) -> Check:
    """Return a check that found what may harm a job."""
    return Check(id=name, status=Status.NOTE, text=text, hint=hint)


def fail(name: str, text: str, hint: str) -> Check:
    """Return a check that found what will fail."""
    return Check(id=name, status=Status.FAIL, text=text, hint=hint)


def bad(name: str, text: str, hint: str, *, is_sure: bool) -> Check:
    """Return a failure, or a note if the job may find it otherwise."""
    return (fail if is_sure else note)(name, text, hint)
