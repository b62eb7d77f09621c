"""What a training on several hosts survives, and how it ends if it can't."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chaos.checks import Reference, other_losses, problems
from tests.chaos.faults import IN_BETWEEN, RESTARTS, UNDISTURBED
from tests.chaos.training import add_scripts
from tests.chaos.training import submit as submit_here
from tests.hosts import LAPTOP, Hosts
from tests.patience import patience, wait_for
from tests.road import project
from tests.ssh.training import (
    ONE_EACH,
    WAIT,
    Job,
    job_of,
    kill,
    nothing_left,
    prepare,
    running,
    submit,
)

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(900)]
PAIR = ("h1", "h2")
TRIO = ("h1", "h2", "h3")
LOST_S = 70.0  # until a host is noticed to be gone
STOPPED_S = 120.0  # until the others have stopped
CUT_S = 20.0


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


@pytest.mark.long
@pytest.mark.torch
@BOTH
def test_a_rank_that_is_killed_comes_back(
    hosts: Hosts, reference: Reference, is_shared: bool
) -> None:
    with_and_without_shared(hosts, is_shared)
    job = submit(hosts, PAIR, *RESTARTS)
    job.training.wait_for_step(IN_BETWEEN, 1)
    kill(hosts, "h2", job.training.rank_pid(1, 1))
    ends_equal(job, reference, 2)


@pytest.mark.long
@pytest.mark.torch
def test_a_spare_host_takes_the_place_of_one_that_crashes(
    hosts: Hosts, reference: Reference
) -> None:
    job = submit(hosts, TRIO, *RESTARTS, "--set", "slurm.spare_nodes=1")
    job.training.wait_for_step(IN_BETWEEN, 1)
    begin = time.monotonic()
    hosts.crash("h2")
    job.training.wait_for_attempt(2)
    assert time.monotonic() - begin < LOST_S * patience()
    ends_equal(job, reference, 2)
    assert job.training.world(2) == ["h1", "h3"]


@pytest.mark.long
@pytest.mark.torch
def test_a_spare_host_does_not_replace_one_that_alone_has_a_part_of_the_checkpoint(
    hosts: Hosts, reference: Reference
) -> None:
    hosts.share()
    job = submit(hosts, TRIO, *RESTARTS, "--set", "slurm.spare_nodes=1")
    job.training.wait_for_step(IN_BETWEEN, 1)
    hosts.crash("h2")
    wait_for(lambda: job.is_said("waiting up to 10m for h2"), "the run to wait")
    hosts.boot("h2")
    ends_equal(job, reference, 2)
    assert job.training.world(2) == ["h1", "h2"]


@pytest.mark.long
@pytest.mark.torch
@BOTH
def test_a_host_that_crashes_is_awaited(
    hosts: Hosts, reference: Reference, is_shared: bool
) -> None:
    with_and_without_shared(hosts, is_shared)
    job = submit(hosts, PAIR, *RESTARTS, "--set", "wait_for_hosts=5m")
    job.training.wait_for_step(IN_BETWEEN, 1)
    hosts.crash("h2")
    wait_for(lambda: job.is_said("waiting up to 5m for h2"), "the run to wait")
    hosts.boot("h2")
    ends_equal(job, reference, 2)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("machine", ["h2", LAPTOP])
def test_a_link_that_is_cut_for_a_while_changes_nothing(
    hosts: Hosts, reference: Reference, machine: str
) -> None:
    job = submit(hosts, PAIR)
    job.training.wait_for_step(IN_BETWEEN, 1)
    hosts.cut_between("h1", machine)
    time.sleep(CUT_S)
    hosts.heal_between("h1", machine)
    ends_equal(job, reference, 1)


@pytest.mark.long
@pytest.mark.torch
def test_a_lost_courier_costs_one_attempt(hosts: Hosts, reference: Reference) -> None:
    """Once the courier itself is killed, once only the connection to it."""
    job = submit(hosts, PAIR, *RESTARTS)
    for attempt, host, text in ((1, "h2", "hosts.courier"), (2, "h1", "ssh ")):
        job.training.wait_for_step(IN_BETWEEN, attempt)
        (found,) = running(hosts, host, text)
        kill(hosts, host, found.pid)
        job.training.wait_for_attempt(attempt + 1)
    ends_equal(job, reference, 3)


@pytest.mark.long
@pytest.mark.torch
def test_without_the_first_host_the_others_stop_and_the_run_can_resume(
    hosts: Hosts, reference: Reference
) -> None:
    job = submit(hosts, PAIR)
    job.training.wait_for_step(IN_BETWEEN, 1)
    begin = time.monotonic()
    hosts.crash("h1")
    wait_for(lambda: not hosts["h2"].processes(), "h2 to stop")
    assert time.monotonic() - begin < STOPPED_S * patience()
    assert job.status()["state"] == "NODE_FAIL"
    assert "h1, which conducts the run, is lost" in job.cli("logs", job.id, "-n", "all").stdout
    resumed = job.cli("resume", job.id, "--hosts", "h3,h2")
    assert resumed.returncode == 0, resumed.stderr
    ends_equal(job, reference, 2)


# Without torch


def test_without_its_controller_a_run_ends_on_all_hosts(hosts: Hosts) -> None:
    job = submit(hosts, PAIR, command=WAIT)
    job.wait_for_ranks(2)
    (controller,) = running(hosts, "h1", "hosts.controller")
    kill(hosts, "h1", controller.pid)
    nothing_left(hosts)
    status = job.status()
    assert status["state"] == "FAILED"
    assert "controller" in json.dumps(status)


@pytest.mark.long
def test_a_run_that_waits_for_a_host_says_so_and_can_be_cancelled(hosts: Hosts) -> None:
    job = submit(hosts, PAIR, *RESTARTS, command=WAIT)
    job.wait_for_ranks(2)
    hosts.revoke("h1", "h2")
    (client,) = running(hosts, "h1", "ssh ")
    kill(hosts, "h1", client.pid)
    wait_for(lambda: job.waits_for() == "waiting up to 10m for h2", "the run to wait")
    assert job.cli("cancel", "--yes", job.id).returncode == 0
    assert job.end() == "CANCELLED"


@pytest.mark.long
def test_a_host_that_is_cut_off_stops_and_its_spare_trains(hosts: Hosts) -> None:
    """The host sees the shared directory: it must not end the run that others continue."""
    job = submit(hosts, TRIO, *RESTARTS, "--set", "slurm.spare_nodes=1", command=WAIT)
    job.wait_for_ranks(2)
    hosts.cut("h2")
    assert job.end() == "COMPLETED"
    assert job.training.world(2) == ["h1", "h3"]
    wait_for(lambda: not running(hosts, "h2", "waiter"), "the ranks of h2 to end")


@pytest.mark.long
@BOTH
def test_a_job_needs_its_submitter_no_longer(hosts: Hosts, is_shared: bool) -> None:
    with_and_without_shared(hosts, is_shared)
    here = prepare(hosts, is_shared=is_shared)
    argv = ["submit", "--wait", "--cluster", "ssh", "--hosts", ",".join(PAIR), *ONE_EACH, *WAIT]
    client = hosts.laptop.start(["clusterrun", *argv], cwd=here)
    wait_for(lambda: running(hosts, "h2", "waiter.py"), "a rank on h2")
    hosts.laptop.signal(client, signal.SIGKILL)
    job = job_of(hosts, "H1", is_shared=is_shared)
    time.sleep(5)
    assert running(hosts, "h2", "waiter.py"), job.batch_output()
    job.hosts["h1"].run(["clusterrun", "cancel", "--yes", str(job.root_there)], check=True)
    wait_for((job.training.root / "end.json").exists, "the end")
    assert "CANCELLED" in (job.training.root / "end.json").read_text()
