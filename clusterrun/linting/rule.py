"""Look for pitfalls in a script and its launch: each has an id, the reason and the fix.

A rule is silent if it is unsure. A finding that is false costs more trust than a missed one.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from clusterrun import linting
from clusterrun.config.choices import Strategy
from clusterrun.linting.source import Script
from clusterrun.shared.finding import Finding, Severity


class Launch(NamedTuple):
    """What the job gives the script."""

    nodes: int = 2
    ranks_per_node: int = 2
    has_gpus: bool = True
    is_sized: bool = True  # nodes and ranks are no assumption
    is_simulated: bool = False  # all nodes are this machine
    strategy: str = "ddp"
    max_restarts: int = 0
    shared_port: int = 0  # that the user chose; 0 if no other job can be on the nodes
    args: tuple[str, ...] = ()  # of the script
    setup: tuple[str, ...] = ()  # lines of bash that run before
    missing: tuple[str, ...] = ()  # files that the accelerate YAML names and that do not exist
    is_missing: Callable[[str], bool] = lambda path: False  # certainly; of any other file

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def is_sharded(self) -> bool:
        """Return whether the strategy splits the model or its optimizer, so that all ranks save."""
        return Strategy(self.strategy).stage > 0


Found = tuple[ast.AST | None, str]  # where (None: in the job's settings), and what
Search = Callable[[Script, Launch], Iterator[Found]]


class Rule(NamedTuple):
    """A pitfall: why it harms, what to do, and how it is found."""

    id: str
    reason: str
    fix: str
    search: Search


_RULES: Final[dict[str, Rule]] = {}


def rule(name: str, reason: str, fix: str) -> Callable[[Search], Search]:
    """Add a rule; `name` is its id."""

    def register(search: Search) -> Search:
        _RULES[name] = Rule(id=name, reason=reason, fix=fix, search=search)
        return search

    return register


def rules() -> Mapping[str, Rule]:
    """Return the rules by id: those of all modules in this directory."""
    for module in pkgutil.iter_modules(linting.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return _RULES


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
        for rule in rules().values()
        for node, what in rule.search(script, launch)
    ]
    kept = (each for each in found if not script.is_ignored(each.line, each.id))
    return tuple(sorted(kept, key=lambda each: each.line))
