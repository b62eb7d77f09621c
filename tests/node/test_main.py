"""The batch script's door: `python -m clusterrun.node`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.node.jobs import Job


def node(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterrun.node", *argv],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("argv", [(), ("agent", "/x"), ("agent", "/x", "one"), ("dance", "/x")])
def test_a_wrong_call_shows_the_usage(argv: tuple[str, ...]) -> None:
    done = node(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m clusterrun.node agent RUN_DIR ATTEMPT")


def test_a_run_that_was_submitted_by_hand_is_registered(stub_job: Callable[..., Job]) -> None:
    job = stub_job("pass")
    done = node("register", str(job.paths.root), SLURM_JOB_ID="4711")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(job.paths.record.read_text())["job_id"] == "4711"
    link = job.paths.root.parents[1] / "by-job" / "4711"
    assert link.resolve() == job.paths.root.resolve()
