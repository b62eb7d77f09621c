"""Check the interpreter of a job before the job is queued."""

from __future__ import annotations

from collections.abc import Iterator

from clusterrun.config.choices import Cluster, Strategy
from clusterrun.config.environments import Tool, read_step
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.inputs import runs_in_container
from clusterrun.shared.versions import dotted, parse_version

_OTHER = "or name another interpreter with --python"


def interpreter_problem(spec: JobSpec, facts: Facts, strategy: Strategy) -> UsageError | None:
    """Return why the job can't run with its interpreter; None if no reason is known."""
    found = facts.interpreter
    if runs_in_container(spec):
        return None
    if not found.path:
        return None if facts.cluster.is_hosts else _absent(spec, facts)
    if too_old := list(_too_old(facts)):
        return UsageError(f"{found.path} {too_old[0]}", hint=f"upgrade it, {_OTHER}")
    wanted = ["clusterrun", "torch", "accelerate", *(["deepspeed"] * strategy.is_deepspeed)]
    missing = [name for name in wanted if not found.packages.get(name)]
    if not found.is_known or not missing:
        return None
    named = " or ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    why = f", which strategy {strategy.value} needs" if missing == ["deepspeed"] else ""
    return UsageError(
        f"{found.path} has no {named}{why}",
        hint=f"run {found.path} -m pip install '.[train]' in a clone of clusterrun, {_OTHER}",
    )


def is_certain(spec: JobSpec, facts: Facts) -> bool:
    """Return whether the nodes will find the same: bash or a module may add packages."""
    if facts.cluster.is_hosts:
        return False  # they have disks of their own
    steps = [read_step(line) for line in spec.setup]
    is_plain = all(step.tool in (Tool.VENV, Tool.CONDA) for step in steps)
    is_here = bool(facts.interpreter.path) or facts.cluster is Cluster.LOCAL
    return is_plain and is_here and "PYTHONPATH" not in spec.env


def _absent(spec: JobSpec, facts: Facts) -> UsageError | None:
    if "/" not in facts.python and spec.setup:
        return None  # the setup lines provide it
    return UsageError(
        f"there is no interpreter '{facts.python}' on this machine",
        hint="name one with --python, or omit it to use the interpreter that runs clusterrun",
    )


def _too_old(facts: Facts) -> Iterator[str]:
    found = facts.interpreter
    least = facts.oldest.get("python")
    if found.version and least and found.version < least:
        yield f"is Python {dotted(found.version)}; clusterrun needs {dotted(least)} or newer"
    for name, text in found.packages.items() if found.is_known else ():
        version, least = parse_version(text), facts.oldest.get(name)
        if version and least and version < least:
            yield f"has {name} {text}; clusterrun needs {dotted(least)} or newer"
