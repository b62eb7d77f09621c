"""The rules by which the verdict on a failure decides on a restart."""

from __future__ import annotations

from enum import Enum

from clusterrun.errors import UsageError


class VerdictRule(str, Enum):
    """A rule; its name switches it off (`launch.ignore_rules`).

    `WOULD_REPEAT`: an error that another try would repeat stops the run. `SAME_CAUSE`: so does the
    second failure in a row by one cause at one place. `FAULTY_NODE`: a faulty node is excluded.
    """

    WOULD_REPEAT = "would-repeat"
    SAME_CAUSE = "same-cause"
    FAULTY_NODE = "faulty-node"


def check_rule(label: str, value: str) -> None:
    """Refuse a name that no rule has. Raises UsageError."""
    names = [rule.value for rule in VerdictRule]
    if value not in names:
        raise UsageError(f"{label}: no rule '{value}'", hint=f"use one of: {', '.join(names)}")
