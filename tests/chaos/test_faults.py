"""A training comes back by itself from each fault, and ends as if nothing had been.

The short form: two ranks on two nodes of the real Slurm. `benchmarks/chaos` has all faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.checks import Reference, have_met, problems
from tests.chaos.faults import FAULTS, UNDISTURBED, Fault
from tests.chaos.training import submit
from tests.chaos.undergo import stage, undergo, wait_until_over
from tests.cluster.cluster import Cluster
from tests.road import Project

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(400)]

# What takes minutes (Slurm waits for a lost node, or looks at limits each half minute) is left
# to the benchmark.
SLOW = {
    "node killed", "link cut for good", "link cut for 20 s", "time limit",
    "preempted, requeued", "agent killed", "shard missing",
}  # fmt: skip
SHORT = [fault for fault in FAULTS.values() if fault.name not in SLOW]


@pytest.fixture(name="here")
def _here(tmp_path: Path, cluster: Cluster) -> Iterator[Project]:
    with stage(tmp_path, cluster) as here:
        yield here
    cluster.wait_no_processes(60)


@pytest.fixture(scope="module", name="references")
def _references(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> dict[int, Reference]:
    """Train without any fault, as long as each of the faults wants it."""
    found = {}
    for steps in sorted({fault.steps for fault in SHORT}):
        with stage(tmp_path_factory.mktemp("undisturbed"), cluster) as here:
            training = submit(here, steps=steps)
            wait_until_over(training, cluster)
            found[steps] = Reference.of(training)
    return found


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: fault.name)
def test_the_training_comes_back(
    fault: Fault, here: Project, cluster: Cluster, references: dict[int, Reference]
) -> None:
    undergone = undergo(fault, here, cluster)
    reference = references[fault.steps]
    assert problems(undergone.training, reference, fault, undergone.state) == []
    for neighbour in undergone.training.neighbours:
        assert have_met(undergone.training, neighbour)
        state = str(neighbour.status()["state"])
        assert problems(neighbour, references[neighbour.steps], UNDISTURBED, state) == []
    cluster.wait_no_processes(30)
