"""The time limits of a smoke job fit together."""

from __future__ import annotations

from clusterrun.node.smoke import group, process
from clusterrun.node.smoke.probes import COMPUTE_S, REDUCE_S
from clusterrun.verbs import smoke


def test_a_node_outlives_all_that_the_head_waits_for() -> None:
    meeting = process.MEET_S + process.START_MOST_S
    computing = COMPUTE_S + REDUCE_S + 2 * group.SPARE_S
    asking = 3 * group.ANSWER_S  # store, listen, send
    assert process.CHECKS_S + meeting + computing + asking < process.LIMIT_S


def test_the_job_outlives_its_nodes() -> None:
    assert process.LIMIT_S < smoke.MINUTES * 60
    assert process.LIMIT_S < smoke.START_S + smoke.REPORT_S
