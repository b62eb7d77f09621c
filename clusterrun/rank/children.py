"""Watch the processes that a rank starts with multiprocessing: they must not train separately.

A forked process inherits the checks of its rank. A spawned one is a new interpreter: it installs
them when it reads the first data from its parent, before it imports anything from the script.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from clusterrun.rank.import_hooks import Patch, patch_on_import

# Without the working directory, as in the ranks: a project's modules come later.
_INSTALL = """
import sys
path = sys.path[:]
sys.path[:] = filter(None, path)
try:
    from clusterrun.rank import children
    children.install()
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
        return {"clusterrun": _Install(), **original(name)}

    module.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def install() -> None:
    """Watch this process, which a rank spawned; this costs nothing until torch is imported."""
    distributed = ("torch.distributed.distributed_c10d", "torch.distributed.rendezvous")
    names = (*distributed, "torch.optim.optimizer")
    patches = {name: lambda module: _patches()[module.__name__](module) for name in names}
    patch_on_import({**patches, "multiprocessing.spawn": pass_on})


@functools.cache
def _patches() -> dict[str, Patch]:
    """Return what a rank itself patches; only a process that imports torch needs it."""
    from clusterrun.rank.contract import Contract
    from clusterrun.rank.ending import RankEnd

    return Contract(os.environ, RankEnd().break_off, is_child=True).patches()
