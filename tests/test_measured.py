"""What a run took is read from its events and its checkpoints, whatever else stands in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clusterrun.advice.measured import Measured, measure
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files


def write(paths: RunPaths, node: str, *events: dict[str, Any]) -> None:
    paths.events_dir.mkdir(exist_ok=True)
    lines = [json.dumps({"attempt": 1, "node": node, **event}) for event in events]
    paths.events(node).write_text("\n".join(["half a li", *lines, '{"type": "step"}', ""]))


def step(ts: float, number: int, attempt: int = 1) -> dict[str, Any]:
    return {"type": "step", "ts": ts, "step": number, "attempt": attempt}


def peaks(rank: int, rss: int, **more: int) -> dict[str, Any]:
    return {"type": "peaks", "ts": 9.0, "rank": rank, "rss_bytes": rss, **more}


def test_a_step_takes_the_median_of_what_lies_between_reports(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    times = (step(0.0, 1), step(1.0, 3), step(2.0, 5), step(12.0, 6), step(12.1, 90))
    write(paths, "n1", *times)
    assert measure(paths).step_s == 0.5
    assert measure(paths).steps == 90


def test_a_share_of_the_first_reports_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    write(paths, "n1", step(0.0, 1), step(9.0, 2), step(18.0, 3), step(19.0, 4), step(20.0, 5))
    assert (measure(paths).step_s, measure(paths).timed) == (5.0, 4)
    found = measure(paths, warm_up=0.5)
    assert (found.step_s, found.timed) == (1.0, 2)
    assert measure(paths, warm_up=0.2).timed == 4  # a few are all needed


def test_a_counter_that_repeats_or_restarts_is_passed_over(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    write(paths, "n1", step(0.0, 5), step(1.0, 1), step(2.0, 1), step(4.0, 2))
    assert measure(paths).step_s == 2.0
    write(paths, "n1", step(0.0, 5), step(1.0, 1))
    assert measure(paths).step_s is None
    write(paths, "n1", step(0.0, 1), step(1.0, 2), step(100.0, 3, 2), step(101.0, 4, 2))
    assert measure(paths).step_s == 1.0, "the time between two attempts is no step"


def test_peaks_are_added_up_within_a_node_and_the_largest_is_told(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    write(paths, "n1", peaks(0, 100, cuda_allocated_bytes=7), peaks(1, 110))
    write(paths, "n2", peaks(2, 90, cuda_allocated_bytes=9), peaks(3, 90))
    found = measure(paths)
    assert (found.host_bytes, found.gpu_bytes) == (210, 9)


def test_the_newest_complete_checkpoint_is_weighed(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    saved = checkpoint_files.step_directory(paths.checkpoints_dir, 10)
    saved.mkdir(parents=True)
    (saved / "model.bin").write_bytes(bytes(5000))
    found = checkpoint_files.Checkpoint(path=saved, step=10, world_size=1, settings={})
    checkpoint_files.mark(found)
    size = measure(paths).checkpoint_bytes
    assert size is not None
    assert 5000 < size < 6000


def test_a_run_that_said_nothing_has_no_measure(tmp_path: Path) -> None:
    nothing = Measured(
        step_s=None, steps=None, gpu_bytes=None, host_bytes=None, checkpoint_bytes=None
    )
    assert measure(RunPaths(root=tmp_path)) == nothing
