"""What a training on several hosts survives, and how it ends if it can't."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chaos.checks import Reference, other_losses, problems
from tests.chaos.faults import RESTARTS, UNDISTURBED
from tests.chaos.training import submit as submit_here
from tests.chaos.training import add_scripts
from tests.hosts import LAPTOP, Hosts
from tests.patience import PATIENCE, wait_for
from tests.road import project
from tests.ssh.training import IN_BETWEEN, WAIT, Job, job_of, kill, nothing_left, running, submit

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(900)]
PAIR = ("h1", "h2")
TRIO = ("h1", "h2", "h3")
long_training = [pytest.mark.long, pytest.mark.torch]


@pytest.fixture(scope="module", name="reference")
def _reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Train undisturbed on two simulated nodes of this machine."""
    directory = tmp_path_factory.mktemp("local")
    here = add_scripts(project(directory / "project", directory / "state"))
    training = submit_here(here, "--cluster", "local")
    here.ok("status", training.first_job_id, "--wait")
    return Reference.of(training)


@pytest.fixture(autouse=True)
def _clean(hosts: Hosts) -> Iterator[None]:
    yield
    nothing_left(hosts)


def ends_equal(job: Job, reference: Reference, attempts: int) -> None:
    """Hold a run to complete as the undisturbed one did, bit for bit, in so many attempts."""
    state = job.end()
    if job.is_shared:
        fault = replace(UNDISTURBED, attempts=attempts)
        assert problems(job.training, reference, fault, state) == [], job.batch_output()
    else:  # each host has a part of the checkpoint
        assert (state, job.training.newest_attempt) == ("COMPLETED", attempts), job.batch_output()
        assert list(other_losses(job.training, reference)) == []
        assert {line.step for line in job.training.printed()} == set(reference.losses)


def with_and_without_shared(hosts: Hosts, is_shared: bool) -> None:
    if not is_shared:
        hosts.share()


BOTH = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])


@BOTH
@pytest.mark.long
@pytest.mark.torch
def test_a_rank_that_is_killed_comes_back(
    hosts: Hosts, reference: Reference, is_shared: bool
) -> None:
    with_and_without_shared(hosts, is_shared)
    job = submit(hosts, PAIR, *RESTARTS)
    job.training.wait_for_step(IN_BETWEEN, 1)
    job.kill_rank(1, "h2")
    ends_equal(job, reference, 2)
