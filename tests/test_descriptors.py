"""How many files a process may open: as many as its hard limit allows."""

from __future__ import annotations

import subprocess
import sys

RAISE = """
import resource
from clusterrun.shared.descriptors import raise_descriptor_limit
found = raise_descriptor_limit({wanted})
assert found <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(found, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    for soft, wanted, limits in (
        (256, "", "1000 1000 1000"),
        (256, "500", "500 500 1000"),
        (600, "500", "600 600 1000"),
        (256, "5000", "1000 1000 1000"),
    ):
        code = RAISE.format(wanted=wanted)
        shell = f"ulimit -Sn {soft} && ulimit -Hn 1000 && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == limits
