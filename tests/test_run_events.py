"""Events and samples are read by their fields, whatever else stands in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.advice.question import Measured, measure
from clusterrun.rundir import usage
from clusterrun.rundir.events import LAST_BYTES, Event, EventType, parse, read, read_ends
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import Alert, AlertKind, GpuSample, Sample, to_line
from clusterrun.shared import checkpoint_files

STEP = {"type": "step", "step": 7, "total": 9, "node": "n1", "attempt": 2, "ts": 5}


def test_the_order_of_the_keys_does_not_count() -> None:
    wanted = Event(at=5.0, type=EventType.STEP, attempt=2, node="n1", step=7, total=9)
    for keys in (sorted(STEP), sorted(STEP, reverse=True)):
        assert parse(json.dumps({key: STEP[key] for key in keys}).encode()) == wanted


@pytest.mark.parametrize(
    "change",
    [{"ts": "x"}, {"ts": None}, {"attempt": True}, {"attempt": "1"}, {"type": "own"}, {"type": []}],
)
def test_what_is_no_event_is_none(change: dict[str, Any]) -> None:
    assert parse(json.dumps({**STEP, **change}).encode()) is None


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "n1.jsonl"
    line, other = (json.dumps({**STEP, "type": name}).encode() for name in ("step", "unsaved"))
    damaged = (b'{"type": "step"', b"\xff", b"[" * 9999)
    path.write_bytes(b"\n".join((line, *damaged, other, line, b'{"ty')))
    assert [event.step for event in read(path, (EventType.STEP,))] == [7, 7]
    assert list(read(path, (EventType.PEAKS,))) == []
    assert list(read(tmp_path / "missing", (EventType.STEP,))) == []
    assert [event.step for event in read_ends(path, 2)] == [7, 7, 7]
    assert list(read_ends(path, 1)) == []


def test_what_an_attempt_wrote_last_is_found_before_a_later_attempt(tmp_path: Path) -> None:
    path, note = tmp_path / "n1.jsonl", {**STEP, "type": "note", "note": {"text": "x"}}
    rows = [{**row, "attempt": n} for n in (1, 2, 3) for row in (*[STEP] * 9000, note)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for attempt in (1, 2, 3):
        first, *rest, last = read_ends(path, attempt)
        assert (first.type, last.note) == (EventType.STEP, note["note"])
        assert len(rest) > 0.9 * LAST_BYTES / len(json.dumps(STEP))
    assert list(read_ends(tmp_path / "none", 1)) == []
    path.write_text(json.dumps({**rows[0], "reason": "x" * 100_000}) + "\n" + json.dumps(STEP))
    assert len(list(read_ends(path, 1))) == 1


GPU = GpuSample(index=0, memory_bytes=1 << 36, activity=5.5)


def sample(at: float, **fields: object) -> Sample:
    return Sample(**{"at": at, "attempt": 1, **fields})  # type: ignore[arg-type]


@pytest.fixture(name="paths")
def _paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    paths.attempt(1).mkdir(parents=True)
    paths.usage_dir.mkdir()
    return paths


def test_a_sample_is_read_as_it_was_written(paths: RunPaths) -> None:
    alert = Alert(kind=AlertKind.GPU_MEMORY, at=7.5, gpu=0)
    full = sample(8.5, host_bytes=5, ranks=((0, 7), (1, 8)), gpus=(GPU, GPU), alerts=(alert,))
    paths.usage("n1").write_bytes(to_line(sample(3.5)) + to_line(full))
    paths.usage("n2").write_bytes(to_line(sample(1.5, attempt=2)))
    assert usage.read_latest(paths) == {"n1": full}, "n2 is of another attempt"


def test_the_newest_sample_may_be_in_the_older_file(paths: RunPaths) -> None:
    paths.earlier_usage("n1").write_bytes(b"".join(to_line(sample(at)) for at in (1, 2, 3)))
    assert usage.read_latest(paths) == {"n1": sample(3)}
    paths.usage("n1").write_bytes(b"".join(to_line(sample(at)) for at in (4, 5)))
    assert usage.read_latest(paths) == {"n1": sample(5)}


def test_a_line_longer_than_the_first_look_is_found(paths: RunPaths) -> None:
    long = sample(1, ranks=tuple((rank, 1 << 33) for rank in range(500)))
    paths.usage("n1").write_bytes(to_line(long))
    assert usage.read_latest(paths) == {"n1": long}


GOOD = json.loads(to_line(sample(1, host_bytes=5, gpus=(GPU,))))
BAD = ({"at": 1e300}, {"at": float("nan")}, {"gpus": 5}, {"gpus": [5]}, {"gpus": "\x1b[2J"})
WORSE = ({"gpus": [["\x1b]0;x"]]}, {"ranks": [[1]]}, {"ranks": {"a": 1}}, {"cpus": "4"})
WORST = ({"alerts": [{"kind": "\x1b[2J", "at": 1}]}, {"host_bytes": 1 << 70}, {"attempt": True})


@pytest.mark.parametrize("change", [*BAD, *WORSE, *WORST])
def test_a_line_that_is_no_sample_is_skipped(paths: RunPaths, change: dict[str, object]) -> None:
    line = json.dumps({**GOOD, **change}).encode()
    paths.usage("n1").write_bytes(to_line(sample(1)) + line + b"\n{\0[" + b"[" * 3000)
    assert usage.read_latest(paths) == {"n1": sample(1)}


@given(st.binary(max_size=300))
def test_no_bytes_raise(line: bytes) -> None:
    assert usage.parse(line) is None


@pytest.mark.parametrize(
    ("now", "silent"),
    [(1001.0, {"b": 600.0}), (-9e9, {"b": 600.0}), (1100.0, {"a": 100.0, "b": 700.0})],
)
def test_a_silent_node_is_found_by_the_others_if_the_clock_jumps(
    now: float, silent: dict[str, float]
) -> None:
    samples = {"a": Sample(at=1000.0, attempt=1), "b": Sample(at=400.0, attempt=1)}
    assert usage.silent(samples, now) == silent


# What a run took


def write(paths: RunPaths, node: str, *events: dict[str, Any]) -> None:
    paths.events_dir.mkdir(exist_ok=True)
    lines = [json.dumps({"attempt": 1, "node": node, **event}) for event in events]
    paths.events(node).write_text("\n".join(["half a li", *lines, '{"type": "step"}', ""]))


def step(ts: float, number: int, attempt: int = 1) -> dict[str, Any]:
    return {"type": "step", "ts": ts, "step": number, "attempt": attempt}


def peaks(rank: int, rss: int, **more: int) -> dict[str, Any]:
    return {"type": "peaks", "ts": 9.0, "rank": rank, "rss_bytes": rss, **more}


def test_a_step_takes_the_median_of_what_lies_between_reports_but_the_first(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    times = (step(0.0, 1), step(1.0, 3), step(2.0, 5), step(12.0, 6), step(12.1, 90))
    write(paths, "n1", *times)
    assert (measure(paths).step_s, measure(paths).steps) == (0.5, 90)
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
    assert 5000 < (measure(paths).checkpoint_bytes or 0) < 6000


def test_a_run_that_said_nothing_has_no_measure(tmp_path: Path) -> None:
    found = measure(RunPaths(root=tmp_path))
    names = ("step_s", "steps", "gpu_bytes", "host_bytes", "checkpoint_bytes")
    assert found == Measured(**dict.fromkeys(names))  # type: ignore[arg-type]  # a table of names
