"""The figures of the recovery benchmark, from what a run leaves behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

from benchmarks.chaos.figures import row
from benchmarks.chaos.long import Long
from clusterrun.rundir.outcome import write_end
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.state import JobState
from tests.chaos.faults import FAULTS
from tests.chaos.training import Training
from tests.chaos.undergo import SeenState, Undergone
from tests.road import Project


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
