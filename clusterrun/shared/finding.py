"""What was found about a job, its script or its nodes, by whatever looked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from clusterrun.shared.hostlist import named
from clusterrun.shared.typed import decoded
from clusterrun.shared.wording import count


class Severity(str, Enum):
    """What a finding means for a job: a note may harm it, a failure will; a skip was not made."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"
    SKIP = "skip"


BAD: Final = (Severity.FAIL, Severity.NOTE)  # the worst first


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found."""

    id: str  # of its page (`clusterrun explain`)
    severity: Severity
    text: str
    fix: str = ""  # a command or an edit
    nodes: tuple[str, ...] = ()  # (): this machine, or all as a group
    line: int = 0  # of the script; 0: none

    def __str__(self) -> str:
        """Return a line for people."""
        who = f"{named(self.nodes)}: " if self.nodes else ""
        return f"{who}{self.id}: {self.text}{f'; hint: {self.fix}' if self.fix else ''}"

    @property
    def summary(self) -> str:
        """The text, after the nodes that it is about; if all is well, after their number."""
        is_ok = self.severity is Severity.OK
        who = count(len(self.nodes), "node") if is_ok and self.nodes else named(self.nodes)
        return f"{who}: {self.text}" if who else self.text

    def to_data(self) -> dict[str, Any]:
        """Return a mapping for JSON."""
        what = {"id": self.id, "status": self.severity.value, "text": self.text}
        where = {"nodes": list(self.nodes), "line": self.line or None}
        return {**what, "hint": self.fix or None, **where}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding of what `to_data` returned. Raises ValueError for anything else."""
        names = {"status": "severity", "hint": "fix"}  # of our fields that JSON names differently
        given = {names.get(name, name): value for name, value in data.items() if value is not None}
        finding: Finding = decoded(cls, given)
        return finding


def ok(name: str, text: str) -> Finding:
    """Return a finding of nothing wrong."""
    return Finding(id=name, severity=Severity.OK, text=text)


def skip(name: str, reason: str) -> Finding:
    """Return that a check could not run, and why."""
    return Finding(id=name, severity=Severity.SKIP, text=reason)


def note(name: str, text: str, fix: str) -> Finding:
    """Return what may harm a job."""
    return Finding(id=name, severity=Severity.NOTE, text=text, fix=fix)


def fail(name: str, text: str, fix: str) -> Finding:
    """Return what will fail."""
    return Finding(id=name, severity=Severity.FAIL, text=text, fix=fix)


def bad(name: str, text: str, fix: str, *, is_sure: bool) -> Finding:
    """Return a failure, or a note if the job may find it otherwise."""
    return (fail if is_sure else note)(name, text, fix)
