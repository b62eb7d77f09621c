"""A newer Slurm answers as the system's does: tests of both, and what it alone says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.slurm.test_backend import (  # noqa: F401 - they run here too
    test_a_refusal_is_told_in_sbatchs_words_and_leaves_nothing,
    test_a_requeued_job_waits_and_says_so_and_is_not_over,
    test_cancel_ends_what_runs_and_what_waits_and_leaves_what_has_ended,
    test_jobs_are_asked_about_together_and_unknown_ones_are_missing,
    test_times_nodes_and_limits_are_those_of_slurm,
)
from tests.slurm.test_main_road import (  # noqa: F401
    test_a_rank_has_the_variables_of_a_task_of_srun,
    test_a_rendered_directory_submitted_by_hand_is_the_same_run,
    test_status_list_logs_and_cancel_work_without_accounting,
)

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("own_memory"), pytest.mark.timeout(300)]


@pytest.fixture(name="cluster")
def _cluster(newer_cluster: Cluster) -> Iterator[Cluster]:
    yield newer_cluster
    newer_cluster.run(["scancel", "--me"])
    newer_cluster.wait_no_processes(30)
