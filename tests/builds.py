"""One place for the extensions that DeepSpeed compiles: a build takes a minute, once.

It is the checkout's own, as what is compiled names the environment's directory: two checkouts that
shared one would build everything anew in turns.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


def share() -> None:
    """Have every process that a test starts find its builds in one place, unless told another."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))


def remove_abandoned_locks() -> None:
    """Remove the locks of builds that were killed: others would wait for them for ever.

    The process that builds keeps its lock open.
    """
    locks = set(Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve().glob("*/lock"))
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error):
            locks -= {Path(file.path) for file in process.open_files()}
    for lock in locks:
        lock.unlink(missing_ok=True)
