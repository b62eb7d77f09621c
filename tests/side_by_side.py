"""Which tests run in one process when several processes run tests side by side.

A module's tests stay together if they share a fixture of the module, which would be made in each
process; so do those that import torch and transformers. All others are handed out one by one, what
takes long first. (xdist's own groups have no effect under pytest 9.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
# In the order in which they begin.
LONG = (
    *("tests/chaos/", "tests/rank/", "tests/slurm/", "tests/examples/"),
    *("tests/cluster/", "tests/local/", "tests/ssh/", "tests/matrix/"),
)
TORCH = ("tests/estimates/", "tests/launch/", "tests/cli/")


def turn(nodeid: str) -> int:
    """Return when a test begins, the smallest number first."""
    return next((n for n, begin in enumerate(LONG) if nodeid.startswith(begin)), len(LONG))


@cache
def group(file: str) -> str:
    """Return the name of what a file's tests must stay together with; empty if nothing."""
    if file.startswith(TORCH):
        return "torch"
    text = (ROOT / file).read_text()
    if file.startswith("tests/rank/") and "mark.torch" in text:
        return "ranks that a parent forks"
    return file if 'scope="module"' in text else ""


class InGroups(LoadScopeScheduling):
    """Hand out groups whole and other tests one by one, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.split("::")[0]) or nodeid
