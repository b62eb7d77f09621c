"""Note the lock that this rank holds while it compiles a torch extension.

Other ranks wait until the lock file is gone, on all nodes and also in later jobs. If the rank is
killed while it compiles, its agent removes the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterrun.rank.emit import rank, say_once
from clusterrun.shared.files import write_whole


def watch_locks(module: ModuleType) -> None:
    """Patch `torch.utils.file_baton.FileBaton` to note in the spool which lock it holds."""
    baton: Any = getattr(module, "FileBaton", None)
    acquire, release = getattr(baton, "try_acquire", None), getattr(baton, "release", None)
    if acquire is None or release is None:
        return

    @functools.wraps(acquire)
    def try_acquire(self: Any) -> Any:
        is_mine = acquire(self)
        path = os.path.abspath(self.lock_file_path)
        if is_mine:
            with contextlib.suppress(OSError):
                write_whole(Path(_note_path()), os.fsencode(path))
        build = Path(path).parent
        if rank() == 0 and not any(build.glob("*.so")):  # it compiles or waits
            say_once(f"compiling {build.name}; this takes minutes the first time")
        return is_mine

    @functools.wraps(release)
    def released(self: Any) -> Any:
        result = release(self)
        with contextlib.suppress(OSError):
            os.unlink(_note_path())
        return result

    baton.try_acquire, baton.release = try_acquire, released


def _note_path() -> str:
    return os.path.join(os.environ.get("CLUSTERRUN_SPOOL", ""), f"rank_{rank()}.lock")
