"""Patch modules right after the script imports them, also in the processes that it starts.

A process that a rank forks inherits the checks of its rank: it must not train separately. A spawned
one is a new interpreter: it installs them when it reads the first data from its parent, before it
imports anything from the script.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Patch modules by name: now if they are imported, else on import."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Hook(patches))


class _Hook:
    """Finds a watched module as Python does, and patches it right after its execution."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find for a watched module; None for other modules."""
        if (patch := self._patches.get(name)) is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _patch_after(spec.loader, patch)
                return spec
        return None


def _patch_after(loader: Any, patch: Patch) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module


# Without the working directory, as in the ranks: a project's modules come later.
_INSTALL = """
import sys
path = sys.path[:]
sys.path[:] = filter(None, path)
try:
    from clusterrun.rank import import_hooks
    import_hooks.install()
except Exception:  # such as a foreign module of that name
    pass
finally:
    sys.path[:] = path
"""


class _Install:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_INSTALL, {})


def pass_on(module: ModuleType) -> None:
    """Add the checks to the data that `multiprocessing.spawn` sends to a new process."""
    original = module.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"clusterrun": _Install(), **original(name)}  # runs _INSTALL when unpickled

    module.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def install() -> None:
    """Install the checks in this process, which a rank spawned; before torch, they cost nothing."""

    def patch(module: ModuleType) -> None:
        _patches()[module.__name__](module)

    distributed = ("torch.distributed.distributed_c10d", "torch.distributed.rendezvous")
    names = (*distributed, "torch.optim.optimizer")
    patch_on_import({**dict.fromkeys(names, patch), "multiprocessing.spawn": pass_on})


@functools.cache
def _patches() -> dict[str, Patch]:
    """Return what a rank itself patches; only a process that imports torch needs it."""
    from clusterrun.rank.contract import Contract
    from clusterrun.rank.ending import RankEnd

    return Contract(os.environ, RankEnd().break_off, is_child=True).patches()
