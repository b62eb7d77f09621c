"""A newer Slurm explains a wait as the system's does."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import Cluster
from tests.slurm.test_waiting import (  # noqa: F401 - they run here too
    _as_before,
    test_a_limit_of_the_partition,
    test_another_partition_has_idle_nodes,
    test_maintenance_ahead_and_a_time_that_ends_before_it,
)

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(name="cluster")
def _cluster(newer_cluster: Cluster) -> Cluster:
    return newer_cluster
