"""What a script may import: cheap, silent outside a run, and never in the way of a training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun import runtime
from clusterrun.rank.emit import LossWatch
from tests.patience import patience

IN_A_RUN = {
    "CLUSTERRUN_RUN_DIR": "/runs/job/r1",
    "CLUSTERRUN_ATTEMPT": "2",
    "CLUSTERRUN_JOB_ID": "4711",
    "CLUSTERRUN_NODE": "n2",
    "CLUSTERRUN_WORLD_SIZE": "8",
    "CLUSTERRUN_CHECKPOINT_DIR": "/runs/job/r1/checkpoints",
    "RANK": "0",
}


@pytest.fixture(name="spool")
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in IN_A_RUN.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path))
    monkeypatch.setattr(runtime, "_steps", runtime._Steps())
    return tmp_path


def events(spool: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = spool / f"rank_{rank}.events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_outside_a_run_nothing_is_known_and_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*IN_A_RUN, "CLUSTERRUN_SPOOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert runtime.info() is None
    assert runtime.checkpoint_dir() is None
    runtime.step(1, 10, loss=2.0)
    runtime.checkpoint("here", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("spool")
def test_inside_a_run_everything_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert runtime.info() == runtime.RunInfo(
        run_dir=Path("/runs/job/r1"), attempt=2, job_id="4711", node="n2", rank=5, world_size=8
    )
    assert runtime.checkpoint_dir() == Path("/runs/job/r1/checkpoints")


def test_a_step_is_an_event(spool: Path) -> None:
    runtime.step(20, 200, loss=2.25, lr=1e-3, note="warm-up")
    (event,) = events(spool)
    assert event["type"] == "step"
    assert (event["step"], event["total"]) == (20, 200)
    assert event["metrics"] == {"loss": 2.25, "lr": 1e-3, "note": "warm-up"}


def test_steps_are_at_most_one_a_second_and_the_last_is_kept_with_its_time(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    for clock in ("monotonic", "time"):
        monkeypatch.setattr(runtime.time, clock, lambda: now)
    for step in range(1, 1001):
        now += 0.01
        runtime.step(step)
    steps = [event["step"] for event in events(spool)]
    assert steps[0] == 1
    assert 10 <= len(steps) <= 11
    ended, now = now, 160.0  # after the last save
    runtime._steps.flush()
    assert (events(spool)[-1]["step"], events(spool)[-1]["ts"]) == (1000, round(ended, 6))
    runtime.step(1001)
    runtime.step(1002, 1002)
    assert events(spool)[-1]["step"] == 1002, "the final step is written at once"


def test_a_step_that_was_held_back_is_written_at_exit(spool: Path) -> None:
    source = "from clusterrun import runtime\nfor n in range(5): runtime.step(n)"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=30 * patience())
    assert [event["step"] for event in events(spool)] == [0, 4]


def test_only_rank_0_reports_a_checkpoint_with_its_whole_path(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    runtime.step(1)
    runtime.checkpoint("x", 1)
    assert events(spool, rank=1) == []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(spool)
    runtime.checkpoint(Path("ckpt/step-20"), 20)
    (event,) = events(spool)
    path = str(spool / "ckpt" / "step-20")
    assert (event["type"], event["path"], event["step"]) == ("checkpoint", path, 20)
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(spool / "gone"))
    runtime.checkpoint("x", 1)  # it must not end a training


class Tensor:
    """What float() takes, as a tensor is; on a GPU, reading it waits."""

    read = 0

    def __float__(self) -> float:
        self.read += 1
        return 0.5


class WholeTensor(Tensor):
    def __index__(self) -> int:
        return 7


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def __str__(self) -> str:
        raise RuntimeError("again")


def test_any_metric_becomes_json_and_nothing_is_raised(spool: Path) -> None:
    values = [Tensor(), WholeTensor(), math.nan, math.inf, Hostile(), None, [1, 2], 10**400]
    runtime.step(1, **{f"m{n}": value for n, value in enumerate(values)})
    written = [0.5, 7, None, None, "Hostile", None, "list", 10**400]
    assert list(events(spool)[0]["metrics"].values()) == written


def test_what_was_planned_is_told_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.planned() is None
    monkeypatch.setenv("CLUSTERRUN_MICRO_BATCH", "4")
    monkeypatch.setenv("CLUSTERRUN_ACCUMULATION", "8")
    monkeypatch.setenv("CLUSTERRUN_GRAD_CKPT", "1")
    assert runtime.planned() == runtime.Planned(
        micro_batch=4, accumulation=8, gradient_checkpointing=True
    )


def summary(*losses: Any) -> dict[str, Any]:
    watch = LossWatch()
    for loss in losses:
        watch.see({"loss": loss})
    return watch.summary()


def test_a_loss_that_never_changes() -> None:
    fresh = [float("2.5") for _ in range(30)]  # each a new object
    expected = {"count": 30, "last": 2.5, "is_constant": True, "is_finite": True}
    assert summary(*fresh) == expected
    assert not summary(*fresh, 2.4)["is_constant"]
    assert summary(*[float("2.5")] * 30)["count"] == 1, "it is only reported again"
    for bad in (float("nan"), float("inf")):
        assert [summary(2.5, bad)["is_finite"], summary(bad, 2.5)["is_finite"]] == [False, True]
    assert summary(2.5, None, "-")["is_finite"] is True


def test_a_tensor_is_read_only_when_its_report_is_written(spool: Path) -> None:
    losses = [Tensor() for _ in range(5)]
    for number, loss in enumerate(losses):
        runtime.step(number, 100, loss=loss)
    assert [loss.read for loss in losses[1:]] == [0] * 4
    runtime._steps.flush()
    runtime.report_end()
    last = events(spool)[-1]
    assert (last["type"], last["count"], last["is_constant"]) == ("losses", 2, True)
