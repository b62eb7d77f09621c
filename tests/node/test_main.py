"""The batch script's door: `python -m clusterrun.node`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import patience


def node(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterrun.node", *argv],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        check=False,
    )


@pytest.mark.parametrize("argv", [(), ("agent", "/x"), ("agent", "/x", "one"), ("dance", "/x")])
def test_a_wrong_call_shows_the_usage(argv: tuple[str, ...]) -> None:
    done = node(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m clusterrun.node agent|smoke RUN_DIR ATTEMPT")
