"""Runs that exit with status 0 and trained nothing, made for real on this machine."""

from __future__ import annotations

import re

import pytest

from tests.local.test_main_road_local import FOUR
from tests.patience import patience
from tests.road import Project

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


# Scripts that never join a process group


def test_a_script_that_joins_nothing_fails_soon_after_its_first_step(here: Project) -> None:
    done = here.cli("submit", "--wait", *FOUR, "apart.py")
    assert done.returncode == 120, done.stderr
    verdict = here.json("status", "L1")["verdict"]
    assert "this rank trains alone" in verdict["message"]
    assert "launch.world_contract=false" in verdict["message"]
    (failed,) = [event for event in here.events("L1") if event["type"] == "failed"]
    first = min(map(float, re.findall(r"first step at ([\d.]+)", here.logs("L1"))))
    assert failed["ts"] - first < 10 * patience()
