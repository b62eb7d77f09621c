"""The arithmetic of the start benchmark; what it measures needs a cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.chaos.figures import row
from benchmarks.chaos.long import Long
from benchmarks.start import back, front, scale, steady, world
from benchmarks.start.turns import compared, in_turns, parts, rotated
from clusterrun.rundir.end import write_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState
from tests.chaos.faults import FAULTS
from tests.chaos.training import Training
from tests.chaos.undergo import SeenState, Undergone
from tests.road import Project


def test_contenders_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({"a": lambda: contender("a"), "b": lambda: contender("b")}, 2)
    assert "".join(order) == "abbaab"
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert [rotated(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


def test_a_ratio_is_the_median_of_the_turns_and_not_of_the_times() -> None:
    times = {"ours": [1.0, 2.0, 9.0], "theirs": [2.0, 1.0, 3.0]}
    ours, theirs = compared(times, "ours", {"theirs": 1.5})
    assert (ours["ours : it"], ours["budget"]) == (1.0, None)
    assert (theirs["median_s"], theirs["ours : it"], theirs["budget"]) == (2.0, 2.0, 1.5)
    assert theirs["ours : it, extremes"] == "0.5-3"


def test_parts_that_no_turn_knows_are_empty() -> None:
    assert parts([{"a": 1.0, "b": None}, {"a": 3.0}]) == {"a": 2.0, "b": None}


def test_a_start_ends_with_the_last_rank() -> None:
    first = {"process": 11.0, "script": 11.5, "imported": 12.0, "collective": 13.0, "step": 13.5}
    last = {"process": 10.0, "script": 11.0, "imported": 12.5, "collective": 14.0, "step": 14.5}
    times = world.times_of([first, last], launched_at=9.0, submitted_at=8.5)
    assert (times["start_s"], times["from sbatch_s"], times["joined_s"]) == (5.0, 5.5, 1.5)
    assert (times["first process_s"], times["last script_s"]) == (1.0, 2.5)
    assert times["process to collective_s"] == 4.0
    restarted = back.times_of([first, last], 9.0)
    assert (restarted["new step_s"], restarted["script to collective_s"]) == (5.5, 3.0)


def test_the_end_of_an_attempt_and_the_next_meeting_are_those_of_the_last_node() -> None:
    events = [{"type": "ended", "attempt": 1, "ts": at} for at in (10.5, 10.75)]
    events += [{"type": "rendezvous", "attempt": number, "ts": 8.0 * number} for number in (1, 2)]
    assert back.between(events, 10.0) == {"attempt ended_s": 0.75, "met again_s": 6.0}
    assert back.between([], 10.0) == {"attempt ended_s": None, "met again_s": None}


def test_the_lines_of_light_ranks_are_found_in_logs_and_in_plain_output() -> None:
    assert scale.up_times("0000000000000001 3 o up 3 12.5\nup 4 13.5\nup\n- z 0\n") == [12.5, 13.5]


def test_what_grows_does_so_linearly_on_the_head_and_not_at_all_on_a_member() -> None:
    meeting = scale.Meeting(
        nodes=101,
        wall_s=1.0,
        head_cpu_s=0.1,
        member_cpu_s=0.001,
        received_bytes=50_000,
        sent_bytes=30_000,
    )
    few, many = (scale.grown(nodes, meeting, 100.0) for nodes in (11, 1001))
    assert few["link: head receives_bytes"] == 5000
    assert many["link: head receives_bytes"] == 500_000
    assert many["link: head's processor_s"] == pytest.approx(1.0)
    assert few["link: a member sends_bytes"] == many["link: a member sends_bytes"] == 500
    assert many["store: connections"] == 9009
    assert few["store: sends_bytes"] == 99 * 100


def test_the_time_of_the_scheduler_and_the_roles_of_processes_are_read() -> None:
    assert front.scheduler_s("10.5 10.75 squeue") == 0.25
    assert steady.role("python", "python -c … clusterrun.node agent /run 1") == "agent"
    assert steady.role("srun", "srun bash node.sh") == "srun"


# The figures of the recovery benchmark, from what a run leaves behind


def run(root: Path, events: list[dict[str, Any]], logs: dict[int, list[tuple[float, int]]]) -> Any:
    for attempt, lines in logs.items():
        (root / "attempts" / str(attempt)).mkdir(parents=True)
        log = root / "logs" / f"a{attempt}" / "node1.log"
        log.parent.mkdir(parents=True)
        text = (f"{int(at * 1e6):016} 0 o step {step}/9 loss 1.0 lr 1\n" for at, step in lines)
        log.write_text("".join(text))
    (root / "events").mkdir()
    (root / "events" / "node1.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return Training(project=Project(path=root, environ={}), root=root, steps=9)


def event(at: float, kind: str, attempt: int) -> dict[str, Any]:
    return {"ts": at, "type": kind, "attempt": attempt}


def test_the_way_from_a_fault_to_the_next_step_is_measured(tmp_path: Path) -> None:
    events = [
        event(100.0, "started", 1),
        event(110.5, "failed", 1),
        event(111.0, "rank_exit", 1),
        event(113.0, "started", 2),
    ]
    logs = {1: [(104.0, 1), (109.0, 6)], 2: [(116.5, 5)]}
    jobs = [SeenState(at=110.0, job_id="7", state="RUNNING")]
    jobs += [SeenState(at=111.5, job_id="8", state="PENDING")]
    training = run(tmp_path, events, logs)
    assert row(Undergone(training=training, hurt_at=110.0, state="COMPLETED", jobs=jobs)) == {
        "ends": "COMPLETED",
        "attempts": 2,
        "noticed_s": 0.5,
        "new_step_s": 6.5,
        "restart_s": 6.0,
        "cold_start_s": 4.0,
        "ratio": 1.5,
        "lost_steps": 2,
        "queued_s": 0.5,
        "running_s": 1.5,
    }


def test_a_run_that_was_not_interrupted_has_no_way_to_measure(tmp_path: Path) -> None:
    training = run(tmp_path, [event(100.0, "started", 1)], {1: [(104.0, 1)]})
    jobs = [SeenState(at=110.0, job_id="7", state="RUNNING")]
    calm = Undergone(training=training, hurt_at=110.0, state="COMPLETED", jobs=jobs)
    assert row(calm) == {"ends": "COMPLETED", "attempts": 1, "noticed_s": None}


def test_a_fault_whose_process_has_ended_is_none(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    started = {**event(99.0, "rank_start", 1), "rank": 1, "pid": ended.pid}
    saved = [{**event(100.0, "checkpoint", 1), "step": step} for step in (4, 8)]
    training = run(tmp_path, [started, *saved], {1: []})
    long = Long(training=training, cluster=Mock(), dice=Random(1))
    long.hurt(FAULTS["checkpoint corrupted"])
    write_end(RunPaths(root=tmp_path), JobState.COMPLETED, 0)
    long.hurt(FAULTS["slurmctld restarted"])
    assert (long.happened, long.too_late) == ([], ["checkpoint corrupted", "slurmctld restarted"])
