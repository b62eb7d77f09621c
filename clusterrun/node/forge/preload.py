"""Import what the ranks will need before they are forked."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable

from clusterrun.node.forge import nvml
from clusterrun.node.forge.fitness import Closed, check


def of_launchers(strategy: str) -> tuple[str, ...]:
    """Return what the launchers and the ranks of a strategy import in any case."""
    found = ["torch", "torch.distributed", "accelerate"]
    return (*found, *(["deepspeed"] * strategy.startswith("zero")))


def of_ranks(strategy: str, installed: Collection[str]) -> tuple[str, ...]:
    """Return what each rank imports in any case, if it is installed.

    accelerate does so for a strategy, a script that imports deepspeed for DeepSpeed's own loop.
    """
    names = ["deepspeed"] if "deepspeed" in installed else []
    if strategy.startswith("zero"):
        names += ["setuptools", "transformers.integrations.deepspeed"]
    return tuple(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def between_attempts() -> tuple[str, ...]:
    """Return what torch imports only when an optimizer is made: a start need not wait for it."""
    name = "torch._dynamo"
    return (name,) if name not in sys.modules and importlib.util.find_spec(name) else ()


def preload(names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Import modules one by one, and check the process after each. Raises Closed."""
    for name in names:
        tell(name)
        _preload(name)


def _preload(name: str) -> None:
    before = set(sys.modules)
    try:
        with nvml.kept_out() as asked:
            _import(name)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        raise Closed(f"cannot import {name}: {text}") from error
    if asked:
        raise Closed(f"{name} asks NVML about the GPUs")
    check(name, sys.modules.keys() - before)


def _import(name: str) -> None:
    """Import a module, or what a package loads only when it is asked for its name."""
    package, _, last = name.rpartition(".")
    if not package or not hasattr(importlib.import_module(package), last):
        importlib.import_module(name)
