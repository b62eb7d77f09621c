"""What more ranks gain, from the times of their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterrun.config.spec import Strategy
from clusterrun.estimates.estimate import Question, measured_speedup, usual_speedup
from clusterrun.estimates.inputs import Setup
from clusterrun.estimates.models import from_numbers
from clusterrun.estimates.speed import Point, Scaling


def point(nodes: int, step_s: float) -> Point:
    return Point(nodes=nodes, ranks=4 * nodes, step_s=step_s, steps=9, job_id="1", run_dir="r")


FOUND = Scaling(
    script="train.py",
    strategy="ddp",
    is_cpu=False,
    procs_per_node=4,
    is_fixed_batch=False,
    measured_at="2026-01-02T03:04:05",
    points=(point(1, 0.5), point(2, 0.625), point(4, 1.0)),
)
SETUP = Setup(
    model=from_numbers(params=1000, active_params=0), nodes=2, procs_per_node=4,
    strategy=Strategy.DDP,
)  # fmt: skip
ASKED = Question(setup=SETUP, scaling=FOUND)


def test_ranks_that_keep_their_batch_gain_by_samples_a_second() -> None:
    gains = [FOUND.gain(found) for found in FOUND.points]
    assert [gain.speedup for gain in gains] == [1.0, 1.6, 2.0]
    assert [gain.efficiency for gain in gains] == [1.0, 0.8, 0.5]
    assert [gain.communication for gain in gains] == pytest.approx([0.0, 0.2, 0.5])


def test_ranks_that_share_one_batch_gain_by_steps_a_second() -> None:
    fixed = replace(FOUND, is_fixed_batch=True, points=(point(1, 0.5), point(2, 0.3125)))
    gain = fixed.gain(fixed.points[1])
    assert (gain.speedup, gain.efficiency) == (1.6, 0.8)


def test_nothing_is_lost_where_more_ranks_are_faster_than_their_number() -> None:
    fast = replace(FOUND, points=(point(1, 0.5), point(2, 0.4)))
    assert fast.gain(fast.points[1]).efficiency == 1.25
    assert fast.gain(fast.points[1]).communication == 0.0


def test_a_plan_of_the_same_kind_takes_what_was_measured() -> None:
    found = measured_speedup(ASKED)
    assert found is not None
    assert (found.low, found.high, found.base, found.measured_at) == (
        1.6,
        1.6,
        4,
        FOUND.measured_at,
    )
    between = measured_speedup(replace(ASKED, setup=replace(SETUP, nodes=3)))
    assert between is not None
    assert (between.low, between.note) == (1.8, "interpolated between 8 and 16")


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, scaling=None),
        replace(ASKED, is_cpu=True),
        replace(ASKED, setup=replace(SETUP, strategy=Strategy.ZERO3)),
        replace(ASKED, setup=replace(SETUP, nodes=4, procs_per_node=2)),
        replace(ASKED, setup=replace(SETUP, nodes=1)),
        replace(ASKED, setup=replace(SETUP, nodes=5)),
    ],
    ids=["nothing", "CPUs", "strategy", "ranks of a node", "the smallest", "beyond"],
)
def test_what_was_measured_holds_for_nothing_else(other: Question) -> None:
    assert measured_speedup(other) is None


def test_one_node_without_a_measurement_has_the_usual_speedup_on_gpus_alone() -> None:
    one = replace(ASKED, setup=replace(SETUP, nodes=1))
    usual = usual_speedup(one)
    assert usual is not None
    assert (usual.low, usual.measured_at) == (3.5, "")
    assert usual_speedup(replace(one, is_cpu=True)) is None
