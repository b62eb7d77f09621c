"""Watch the processes that a rank starts with multiprocessing: they must not train separately.

A forked process inherits the checks of its rank. A spawned one is a new interpreter: it installs
them when it reads the first data from its parent, before it imports anything from the script.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clusterrun.rank.import_hooks import patch_on_import

if TYPE_CHECKING:
    from clusterrun.rank.contract import Contract

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
    patches = {name: functools.partial(_patch, name) for name in names}
    patch_on_import({**patches, "multiprocessing.spawn": pass_on})


def is_mp_spawned() -> bool:
    """Return whether torch.multiprocessing.spawn started this process, directly or not."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    process = multiprocessing.current_process() if multiprocessing else None
    target = getattr(process, "_target", None)
    return getattr(target, "__module__", "") == "torch.multiprocessing.spawn"


def _patch(name: str, module: ModuleType) -> None:
    _contract().patches()[name](module)


@functools.cache
def _contract() -> Contract:
    from clusterrun.rank.worker import contract_of_child

    return contract_of_child()
