"""The processes below an agent, as the kernel lists them."""

from __future__ import annotations

import subprocess

from clusterrun.node.base import processes
from tests.patience import wait_for

TREE = "sleep 60 & (sleep 61 & exec sleep 62) & wait"


def test_children_are_found_without_a_look_at_other_processes() -> None:
    with subprocess.Popen(["bash", "-c", TREE]) as tree:
        try:
            found = wait_for(lambda: _two(processes._children(tree.pid)), "two children")
            assert sorted(processes._children_among_all(tree.pid)) == sorted(found)
            (below,) = (pid for child in found for pid in processes._children(child))
            assert {tree.pid, below, *found} <= set(processes.descendants())
        finally:
            assert processes.kill_descendants() == []
    assert processes._children(tree.pid) == []


def _two(found: list[int]) -> list[int]:
    return found if len(found) == 2 and any(map(processes._children, found)) else []
