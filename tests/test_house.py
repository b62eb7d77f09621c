"""The house rules that can be counted: one name for one thing, short functions, a small package."""

from __future__ import annotations

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

from clusterrun.cli.main import group
from clusterrun.cli.shared.help import GroupedCommand

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("clusterrun", "hydra_plugins")
# Ceilings; they only go down.
MOST_LINES = {"clusterrun": 45_300, "hydra_plugins": 111, "tests": 50_295}
MOST_FILES = {"clusterrun": 228}
MOST_OPTIONS = 50  # of submit, as its --help-all lists them
TIMED = re.compile(r"time\.(monotonic|perf_counter|time)\(\)|\b(took|waited|elapsed)(_s)?\b")


def sources() -> Iterator[tuple[Path, str]]:
    """Yield each module's path and text."""
    for path in sorted(path for top in SHIPPED for path in (ROOT / top).rglob("*.py")):
        yield path, path.read_text()


def shared_names() -> set[str]:
    """Name the public classes that are defined more than once."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path, text in sources():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return {name for name, found in places.items() if len(found) > 1}


def function_lines() -> Iterator[int]:
    """Count the lines of each function."""
    for _, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_two_public_classes_share_a_name() -> None:
    assert shared_names() == set()


def test_functions_are_short() -> None:
    lines = sorted(function_lines())
    assert statistics.median(lines) <= 8
    assert lines[int(0.95 * len(lines))] <= 25
    assert lines[-1] <= 60


def weights() -> Iterator[tuple[str, int, int]]:
    """Yield what has a budget, how much there is, and its ceiling."""
    for directory, ceiling in MOST_LINES.items():
        texts = (path.read_text() for path in (ROOT / directory).rglob("*.py"))
        yield f"lines of {directory}/", sum(len(text.splitlines()) for text in texts), ceiling
    for directory, ceiling in MOST_FILES.items():
        yield f"files of {directory}/", len(list((ROOT / directory).rglob("*.py"))), ceiling
    submit = group.get_command(click.Context(group), "submit")
    assert isinstance(submit, GroupedCommand)
    yield "options of submit", len(list(submit.listed_options(click.Context(submit)))), MOST_OPTIONS


def test_the_project_does_not_grow() -> None:
    assert [weight for weight in weights() if weight[1] > weight[2]] == []


def limits(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what limits a wait here, or how long something may take."""
    if isinstance(node, ast.Call):
        yield from (word.value for word in node.keywords if word.arg == "timeout")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "join"):
            yield from node.args[:1]
    elif isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()":
        yield node.right
    elif isinstance(node, ast.Compare) and TIMED.search(ast.unparse(node)):
        bounds = zip(node.ops, node.comparators, strict=True)
        yield from (bound for op, bound in bounds if isinstance(op, ast.Lt | ast.LtE))


def test_no_test_waits_for_a_bare_number_of_seconds() -> None:
    """A busy machine needs longer: tests/patience.py says how much."""
    bare = [
        f"{path}:{limit.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for limit in limits(node)
        if isinstance(limit, ast.Constant) and type(limit.value) in (int, float) and limit.value
    ]
    assert bare == []


if __name__ == "__main__":
    for what, count, ceiling in weights():
        print(f"{what:<22}{count:>7,} of {ceiling:>7,}")
