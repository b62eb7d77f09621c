"""Look for all pitfalls in a script."""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.linting import rules, settings
from clusterrun.linting.rule import RULES, Launch, Rule
from clusterrun.linting.source import Script

_REGISTERED = (rules, settings)


class Pitfall(NamedTuple):
    """A pitfall at a line of the script; line 0 is a setting of the job."""

    rule: Rule
    line: int
    what: str


def lint(source: bytes, launch: Launch) -> tuple[Pitfall, ...]:
    """Return what harms this launch of a script, by line; () if it is not Python.

    A comment `# clusterrun: ignore RULE` switches a rule off for its line.
    """
    try:
        script = Script(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = [
        Pitfall(rule=rule, line=getattr(node, "lineno", 0), what=what)
        for rule in RULES.values()
        for node, what in rule.look(script, launch)
    ]
    return tuple(
        sorted(
            (each for each in found if not script.is_ignored(each.line, each.rule.id)),
            key=lambda each: each.line,
        )
    )
