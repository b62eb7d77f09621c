"""How patient the tests are: every wait, and every bound on how long something takes, is scaled.

On a machine that is busy, with other work or with tests side by side, everything takes longer.
CLUSTERRUN_TEST_PATIENCE sets the factor; else it is measured at each use.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def patience() -> float:
    """Return how many processes want each core: the load now, and the workers of this run."""
    if given := os.environ.get("CLUSTERRUN_TEST_PATIENCE"):
        return float(given)
    cores = len(os.sched_getaffinity(0))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1.0, (os.getloadavg()[0] + workers) / cores)


def finished(
    argv: Iterable[object], timeout_s: float = 60, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its status, whatever it is, and all that it printed."""
    asked = {"capture_output": True, "text": True, "timeout": timeout_s * patience()}
    asked |= {} if "input" in given else {"stdin": subprocess.DEVNULL}
    return subprocess.run(list(map(str, argv)), **{"check": False, **asked, **given})


def wait_for(
    condition: Callable[[], T], what: str = "it", timeout_s: float = 120, every_s: float = 0.1
) -> T:
    """Wait until the condition holds, and return its value; have more patience as load grows."""
    begin = time.monotonic()
    while not (value := condition()):
        waited_s, limit_s = time.monotonic() - begin, timeout_s * patience()
        assert waited_s < limit_s, f"{what}: not within {waited_s:.0f} s"
        time.sleep(every_s)
    return value
