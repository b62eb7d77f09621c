"""The door for scripts submitted by hand: `python -m clusterrun.backends register`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from clusterrun.backends import layout
from clusterrun.paths import RunsDir
from tests.backends.builders import make_bundle, make_plan


def register(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterrun.backends", *argv],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_wrong_call_shows_the_usage() -> None:
    done = register("/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m clusterrun.backends register RUN_DIR\n")


def test_a_run_that_was_submitted_by_hand_is_registered(tmp_path: Path) -> None:
    runs = RunsDir(root=tmp_path / "runs")
    paths = layout.create_run(runs, "demo", "4711", make_bundle(make_plan(tmp_path, name="demo")))
    done = register("register", str(paths.root), SLURM_JOB_ID="4711")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(paths.record.read_text())["job_id"] == "4711"
    assert runs.job_link("4711").resolve() == paths.root.resolve()
