"""What Slurm has no part in: the same faults on two simulated nodes of this machine."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from tests.chaos.checks import Reference, problems
from tests.chaos.faults import IN_BETWEEN, RESTARTS, UNDISTURBED
from tests.chaos.training import Training, add_scripts, submit
from tests.road import Project, project

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(400)]

LOCAL = ("--cluster", "local")


@pytest.fixture(scope="module", name="here")
def _here(tmp_path_factory: pytest.TempPathFactory) -> Project:
    directory = tmp_path_factory.mktemp("local")
    return add_scripts(project(directory / "project", directory / "state"))


@pytest.fixture(scope="module", name="reference")
def _reference(here: Project) -> Reference:
    training = submit(here, *LOCAL)
    assert end(training) == "COMPLETED"
    return Reference.of(training)


def end(training: Training) -> str:
    training.project.cli("status", training.first_job_id, "--wait")
    return str(training.status()["state"])


def test_a_rank_that_is_killed_comes_back(here: Project, reference: Reference) -> None:
    training = submit(here, *LOCAL, *RESTARTS)
    training.wait_for_step(IN_BETWEEN, 1)
    os.kill(training.rank_pid(1, 1), signal.SIGKILL)
    fault = replace(UNDISTURBED, attempts=2, same_agents=True)
    assert problems(training, reference, fault, end(training)) == []


def test_cancel_with_checkpoint_leaves_no_step_unsaved(here: Project, reference: Reference) -> None:
    training = submit(here, *LOCAL)
    training.wait_for_step(IN_BETWEEN, 1)
    here.ok("cancel", "--checkpoint", "--yes", training.first_job_id)
    fault = replace(UNDISTURBED, warned=True, state="CANCELLED")
    assert problems(training, reference, fault, end(training)) == []
