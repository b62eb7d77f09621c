"""Check the interpreter of a job before the job is queued."""

from __future__ import annotations

from collections.abc import Mapping

from clusterrun.config.choices import Strategy
from clusterrun.config.environments import Tool, read_step
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.launch.inputs import runs_in_container
from clusterrun.shared.wording import dotted, missing_text, parse_version

_OTHER = "or name another interpreter with --python"


def interpreter_problem(spec: JobSpec, facts: Facts, strategy: Strategy) -> UsageError | None:
    """Return why the job can't run with its interpreter; None if no reason is known."""
    found = facts.interpreter
    if runs_in_container(spec):
        return None
    if not found.path:
        return None if facts.cluster.scheduler.has_hosts else _absent(spec, facts)
    texts = (too_old_text(found, facts.oldest, name) for name in ("python", *found.packages))
    if too_old := next(filter(None, texts), ""):
        return UsageError(too_old, hint=f"upgrade it, {_OTHER}")
    missing = [name for name in strategy.packages if not found.packages.get(name)]
    if not found.is_known or not missing:
        return None
    needed_by = f"strategy {strategy.value}" if missing == ["deepspeed"] else ""
    return UsageError(
        missing_text(found.path, missing, needed_by),
        hint=f"run {found.path} -m pip install '.[train]' in a clone of clusterrun, {_OTHER}",
    )


def is_certain(spec: JobSpec, facts: Facts) -> bool:
    """Return whether the nodes will find the same: bash or a module may add packages."""
    if facts.cluster.scheduler.has_hosts:
        return False  # they have disks of their own
    steps = [read_step(line) for line in spec.setup]
    is_plain = all(step.tool in (Tool.VENV, Tool.CONDA) for step in steps)
    is_here = bool(facts.interpreter.path) or bool(facts.cluster.scheduler.is_this_machine)
    return is_plain and is_here and "PYTHONPATH" not in spec.env


def _absent(spec: JobSpec, facts: Facts) -> UsageError | None:
    if "/" not in facts.python and spec.setup:
        return None  # the setup lines provide it
    return UsageError(
        f"there is no interpreter '{facts.python}' on this machine",
        hint="name one with --python, or omit it to use the interpreter that runs clusterrun",
    )


def too_old_text(python: Interpreter, oldest: Mapping[str, tuple[int, int]], name: str) -> str:
    """Say that an interpreter, or its package of this name, is too old; empty if it is not."""
    text, least = python.packages.get(name, "") if python.is_known else "", oldest.get(name)
    found = python.version if name == "python" else parse_version(text)
    if not found or not least or found >= least:
        return ""
    what = f"is Python {dotted(found)}" if name == "python" else f"has {name} {text}"
    return f"{python.path} {what}; clusterrun needs {dotted(least)} or newer"
