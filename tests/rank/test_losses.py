"""The losses that a script reports: which are new, whether they change, and the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterrun import runtime
from clusterrun.rank.losses import LossWatch


class Tensor:
    """A loss on a GPU: reading it waits."""

    read = 0

    def __float__(self) -> float:
        self.read += 1
        return 2.5


def summary(*losses: Any) -> dict[str, Any]:
    watch = LossWatch()
    for loss in losses:
        watch.see({"loss": loss})
    return watch.summary()


def fresh(value: str, times: int) -> list[float]:
    return [float(value) for _ in range(times)]


def test_a_loss_that_never_changes() -> None:
    found = summary(*fresh("2.5", 30))
    assert found == {"count": 30, "last": 2.5, "is_constant": True, "is_finite": True}
    assert not summary(*fresh("2.5", 30), 2.4)["is_constant"]


def test_a_loss_that_is_only_reported_again_is_not_new() -> None:
    assert summary(*[float("2.5")] * 30)["count"] == 1


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_last_loss_that_is_not_finite(value: str) -> None:
    assert summary(2.5, float(value))["is_finite"] is False
    assert summary(float(value), 2.5)["is_finite"] is True
    assert summary(2.5, None, "-")["is_finite"] is True


def test_a_tensor_is_read_only_when_its_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    steps = runtime._Steps()
    monkeypatch.setattr(runtime, "_steps", steps)
    losses = [Tensor() for _ in range(5)]
    for number, loss in enumerate(losses):
        runtime.step(number, 100, loss=loss)
    assert [loss.read for loss in losses[1:]] == [0] * 4
    steps.flush()
    runtime.report_end()
    *_, last = map(json.loads, (tmp_path / "rank_0.events").read_text().splitlines())
    assert (last["type"], last["count"], last["is_constant"]) == ("losses", 2, True)
