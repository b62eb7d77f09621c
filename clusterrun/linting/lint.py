"""Look for all pitfalls in a script."""

from __future__ import annotations

from clusterrun.linting import rules, settings
from clusterrun.linting.rule import RULES, Launch
from clusterrun.linting.source import Script
from clusterrun.shared.finding import Finding, Severity

_REGISTERED = (rules, settings)


def lint(source: bytes, launch: Launch) -> tuple[Finding, ...]:
    """Return what harms this launch of a script, by line; () if it is not Python.

    A comment `# clusterrun: ignore RULE` switches a rule off for its line.
    """
    try:
        script = Script(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = [
        Finding(
            id=rule.id,
            severity=Severity.NOTE,
            text=f"{what}: {rule.reason}",
            fix=rule.fix,
            line=getattr(node, "lineno", 0),
        )
        for rule in RULES.values()
        for node, what in rule.look(script, launch)
    ]
    kept = (each for each in found if not script.is_ignored(each.line, each.id))
    return tuple(sorted(kept, key=lambda each: each.line))
