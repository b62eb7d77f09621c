"""Watch the processes that a rank starts by multiprocessing: they must not train on their own.

A forked process inherits the checks of its rank. A spawned one is a new interpreter: it makes its
own when it reads the first data that its parent sends, before it imports anything of the script.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clusterrun.rank.import_hooks import patch_on_import

if TYPE_CHECKING:
    from clusterrun.rank.contract import Contract

# Without the working directory, as the ranks have it: a project's own modules come later.
_INSTALL = """
import sys
path = sys.path[:]
sys.path[:] = filter(None, path)
try:
    from clusterrun.rank import children
    children.install()
except ImportError:
    pass
finally:
    sys.path[:] = path
"""


class _Install:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_INSTALL, {})


def pass_on(module: ModuleType) -> None:
    """Add the checks to what `multiprocessing.spawn` sends to a new process."""
    original = module.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"clusterrun": _Install(), **original(name)}

    module.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def install() -> None:
    """Watch this process, which a rank has spawned; it costs nothing until it imports torch."""
    names = ("torch.distributed.distributed_c10d", "torch.optim.optimizer")
    patches = {name: functools.partial(_patch, name) for name in names}
    patch_on_import({**patches, "multiprocessing.spawn": pass_on})


def is_mp_spawned() -> bool:
    """Whether torch.multiprocessing.spawn, or what is built on it, has started this process."""
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
