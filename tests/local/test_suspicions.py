"""Runs that exit with status 0 and trained nothing, made for real on this machine."""

from __future__ import annotations

import pytest

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
