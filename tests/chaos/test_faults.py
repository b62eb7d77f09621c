"""A training comes back by itself from each fault, and ends as if nothing had been.

The short form: two ranks on two nodes of the real Slurm. `benchmarks/chaos` has all faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.chaos.checks import Reference, have_met, problems
from tests.chaos.faults import FAULTS, UNDISTURBED, Fault
from tests.chaos.training import submit
from tests.chaos.undergo import stage, undergo, wait_until_over
from tests.cluster.cluster import Cluster
from tests.road import Project

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(400)]

Undisturbed = Callable[[int], Reference]

# Each is another way from a fault to the next attempt; the long form has the others (a cancel
# with a checkpoint is in tests/slurm/test_resume.py too).
SHORT = {"rank killed", "node killed"}
CASES = [
    pytest.param(fault, id=name, marks=() if name in SHORT else pytest.mark.long)
    for name, fault in FAULTS.items()
]


@pytest.fixture(name="here")
def _here(tmp_path: Path, cluster: Cluster) -> Iterator[Project]:
    with stage(tmp_path, cluster) as here:
        yield here
    cluster.wait_no_processes(60)


@pytest.fixture(scope="module", name="undisturbed")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Undisturbed:
    """Train without any fault, as long as a fault wants it, once for all that want the same."""

    @cache
    def train(steps: int) -> Reference:
        with stage(tmp_path_factory.mktemp("undisturbed"), cluster) as here:
            training = submit(here, steps=steps)
            wait_until_over(training, cluster)
            return Reference.of(training)

    return train


@pytest.mark.parametrize("fault", CASES)
def test_the_training_comes_back(
    fault: Fault, here: Project, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    reference = undisturbed(fault.steps)
    undergone = undergo(fault, here, cluster)
    assert problems(undergone.training, reference, fault, undergone.state) == []
    for neighbour in undergone.training.neighbours:
        assert have_met(undergone.training, neighbour)
        state = str(neighbour.status()["state"])
        assert problems(neighbour, undisturbed(neighbour.steps), UNDISTURBED, state) == []
    cluster.wait_no_processes(30)
