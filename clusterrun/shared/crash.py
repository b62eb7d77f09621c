"""Keep the traceback of a fault of clusterrun itself, for a report."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import clusterrun
from clusterrun.shared import files


def write_crash(error: BaseException) -> Path:
    """Write the traceback of an error to the user's cache; return its path. Raises OSError.

    A process keeps its last one.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = Path(cache) / "clusterrun"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"crash-{time.strftime('%Y%m%d')}-{os.getpid()}"
    report = f"clusterrun {clusterrun.__version__}\n{''.join(traceback.format_exception(error))}"
    path = directory / f"{name}.txt"
    files.write_whole(path, report.encode("utf-8", "backslashreplace"))
    return path
