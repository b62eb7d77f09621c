"""What an heir calls on its node: `python -m clusterrun.backends successor`."""

from __future__ import annotations

import os
import subprocess
import sys


def backends(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterrun.backends", *argv],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_wrong_call_shows_the_usage() -> None:
    done = backends("/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m clusterrun.backends successor RUN_DIR")
