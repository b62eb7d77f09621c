"""Agents outlive an attempt that failed, unless a node was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import wait_for
from tests.road import LIGHT, ROOT, Project, wait_for_none

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

TWO_NODES = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "1", "--max-restarts", "2")
WAITS_AT_FIRST = """
import os, time
print("attempt", os.environ["CLUSTERRUN_ATTEMPT"], flush=True)
time.sleep(600 if os.environ["CLUSTERRUN_ATTEMPT"] == "1" else 0)
"""


@pytest.mark.parametrize(
    ("kind", "what", "setup", "is_same"),
    [
        ("rank_start", "rank", "true", True),
        ("started", "node_rank", "true", False),
        ("rank_start", "rank", "sleep 600 &", False),
    ],
)
def test_agents_begin_the_next_attempt_unless_that_would_miss_something(
    here: Project, kind: str, what: str, setup: str, is_same: bool
) -> None:
    """A rank or an agent of the second node is killed, or a setup line has left a process."""
    (here.path / "waits.py").write_text(WAITS_AT_FIRST)
    job_id = here.submit(*TWO_NODES, *LIGHT, "--setup", setup, "waits.py")
    wait_for(lambda: len(here.events_of(job_id, "rank_start")) == 2, "both ranks")
    killed = next(event for event in here.events_of(job_id, kind) if event[what] == 1)
    os.kill(killed["pid"], signal.SIGKILL)
    assert here.cli("status", job_id, "--wait").returncode == 0
    started = here.events_of(job_id, "started")
    first, second = ({e["pid"] for e in started if e["attempt"] == n} for n in (1, 2))
    assert len(first) == len(second) == 2
    assert (first & second) == (first if is_same else set())
    attempts = here.run_dir(job_id) / "attempts"
    assert (attempts / "2" / "outcome.json").exists()
    wait_for_none(here, job_id)


# A virtual environment that `setup` names


def test_the_nodes_run_in_the_virtual_environment_that_setup_names(
    here: Project, tmp_path: Path
) -> None:
    venv = tmp_path / "my venv"
    submit = ("submit", "--cluster", "local", "--nodes", "2", "--wait", *LIGHT)
    (here.path / "where.py").write_text("import os, sys\nprint(sys.prefix, os.environ['EXTRA'])\n")
    argv = ("--setup", f"venv: {venv}", "--setup", "export EXTRA=1", "where.py", "--data", "/no/x")
    refused = here.cli(*submit, *argv)
    assert refused.returncode == 2
    assert f"{venv} is not a virtual environment: it has no bin/activate" in refused.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    ours = [ROOT, *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    done = here.cli(*submit, *argv)
    assert done.returncode == 0, done.stderr
    assert "has no clusterrun" not in done.stderr  # it was asked
    assert "note: --data: /no/x does not exist here" in done.stderr
    assert here.logs(here.json("status")["job_id"]).count(f"{venv} 1") == 2
