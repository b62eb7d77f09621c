"""Runs that exit with status 0 and trained nothing, made for real on this machine."""

from __future__ import annotations

import re

import pytest

from tests.local.test_main_road_local import FOUR
from tests.patience import patience, wait_for
from tests.road import ROOT, Project

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(240)]

ONE = ("--cluster", "local", "--nodes", "1", "--nproc-per-node", "1", "--device", "cpu")


def kinds(here: Project) -> list[str]:
    """Return what `status` suspects, which also decides its exit status."""
    found = [each["kind"] for each in here.json("status")["suspicions"]]
    done = here.cli("status", "--exit-status")
    assert done.returncode == (3 if found else 0)
    assert ("\nsuspect    " in done.stdout) is bool(found)
    return found


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("no-samples", ["no_step"]),
        ("samples", []),
        ("empty", ["no_step"]),
        ("unsaved", ["no_checkpoint"]),
        ("nan", ["loss_not_finite"]),
        ("flat", ["loss_constant"]),
        ("coarse", []),
        ("reported-nan", ["loss_not_finite"]),
        ("reported-flat", ["loss_constant"]),
        ("silent", []),
    ],
)
def test_a_success_that_did_nothing(here: Project, how: str, found: list[str]) -> None:
    if "samples" in how:
        pytest.importorskip("transformers")
    done = here.cli("submit", "--wait", *ONE, "idle.py", how)
    assert done.returncode == 0, done.stderr
    assert kinds(here) == found
    assert ("suspect    " in done.stderr) is bool(found)


def test_a_training_that_was_already_complete(here: Project) -> None:
    done = here.cli("submit", "--wait", *ONE, "idle.py", "complete")
    assert done.returncode == 0, done.stderr
    assert kinds(here) == []
    assert here.json("status")["attempt"] == 2


# Scripts that never join a process group, and one that joins late


SOON = """
import sys
if "clusterrun.node" in sys.orig_argv:
    from clusterrun.node.watch import hangs
    hangs.JOINING_S = 2
"""
LATE = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
from accelerate import Accelerator
print("sum", Accelerator().num_processes)
"""


@pytest.mark.parametrize(
    ("how", "fact"),
    [
        ("loop", "this rank trains alone"),
        ("environment", "has a world of 1, but the job requested 4"),
    ],
)
def test_a_script_that_joins_nothing_fails_soon_after_its_first_step(
    here: Project, how: str, fact: str
) -> None:
    done = here.cli("submit", "--wait", *FOUR, "apart.py", how)
    assert done.returncode == 120, done.stderr
    verdict = here.json("status", "L1")["verdict"]
    assert fact in verdict["message"]
    assert "launch.world_contract=false" in verdict["message"]
    (failed,) = [event for event in here.events("L1") if event["type"] == "failed"]
    first = min(map(float, re.findall(r"first step at ([\d.]+)", here.logs("L1"))))
    assert failed["ts"] - first < 10 * patience()


def test_a_script_that_joins_late_is_reported_and_completes(here: Project) -> None:
    (here.path / "late.py").write_text(LATE)
    (here.path / "lib").mkdir()
    (here.path / "lib" / "sitecustomize.py").write_text(SOON)
    here.extra["PYTHONPATH"] = f"{here.path / 'lib'}:{ROOT}"
    go = here.path / "go"
    job_id = here.submit(*FOUR, "late.py", str(go))
    follower = here.start("logs", "-f", job_id)
    follower.wait_for("ranks are running and none has joined a process group")
    wait_for(lambda: here.json("status", job_id)["unjoined"], "the status")
    assert "none has joined a process group" in here.ok("status", job_id)
    go.touch()
    assert follower.end() == 0
    assert here.json("status", job_id)["unjoined"] is None
    assert "4 ranks in one world" in here.ok("status", job_id)
