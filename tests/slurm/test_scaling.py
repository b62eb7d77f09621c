"""`scaling` on a real Slurm: the table is that of its own runs, and `plan` takes it."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from tests.road import LIGHT, Project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

JOB = ("--nodes", "1,2,4", "--gpus-per-node", "1", *LIGHT)


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    (here.path / "clusterrun.yaml").write_text("script: paced.py\ntraining: {params: 1000}\n")
    return here


def step_s(here: Project, job_id: str) -> float:
    """Return the median of the time of a step, without the first fifth of what was reported."""
    steps = [(event["ts"], event["step"]) for event in here.events_of(job_id, "step")]
    spans = [
        (after - before) / (later - step)
        for (before, step), (after, later) in itertools.pairwise(steps)
        if after - before >= 0.5
    ]
    assert len(spans) >= 2
    return statistics.median(spans[len(spans) // 5 :])


def test_the_speed_ups_are_those_of_the_runs_and_plan_takes_them(here: Project) -> None:
    points = json.loads(here.ok("scaling", *JOB, "--json", "paced.py", "20"))["points"]
    assert [point["ranks"] for point in points] == [1, 2, 4]
    took = [step_s(here, point["job_id"]) for point in points]
    gains = [took[0] * ranks / step for ranks, step in zip((1, 2, 4), took, strict=True)]
    assert [point["step_s"] for point in points] == pytest.approx(took)
    assert [point["speedup"] for point in points] == pytest.approx(gains)
    assert 1 < gains[1] < gains[2] < 4  # a step takes 0.2, 0.25 and 0.35 s
    told = json.loads(here.ok("plan", "--compare", points[2]["job_id"], "--json"))["speedup"]
    assert (told["low"], told["base"]) == (pytest.approx(gains[2]), 1)
    again = here.ok("scaling", *JOB, "--collect", "--json", "paced.py", "20")
    assert json.loads(again)["points"] == points


@pytest.mark.long
def test_a_world_that_fails_on_its_node_leaves_the_row_of_the_other(here: Project) -> None:
    done = here.cli("scaling", "--nodes", "1,2", *JOB[2:], "paced.py", "12", "2")
    assert done.returncode == 1
    rows = [line.split() for line in done.stdout.splitlines()]
    assert (rows[1][:2], rows[1][5]) == (["1", "1"], "1.00")
    assert rows[2][:3] == ["2", "2", "-"]
    assert "warning: 2 nodes: job" in done.stderr
    assert "exit 1: the script exited with status 1: a world of 2 ranks fails here" in done.stderr
