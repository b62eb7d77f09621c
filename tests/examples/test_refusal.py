"""When the example goes on from a checkpoint of another world or with other settings."""

from pathlib import Path
from typing import Any

import pytest
from resume import refusal

from clusterrun.runtime import Checkpoint

SETTINGS = {"lr": 0.002, "effective_batch": 32, "format": "whole", "dropout": 0.0}


def saved(**changes: Any) -> Checkpoint:
    return Checkpoint(
        path=Path("out/step-00000003"),
        step=3,
        world_size=4,
        attempt=1,
        saved_at=0.0,
        settings=SETTINGS | changes,
    )


def test_the_same_run_may_resume() -> None:
    assert refusal(saved(), 4, SETTINGS, exact=True) == ""


def test_another_world_with_the_same_batch_may_resume_whole_checkpoints() -> None:
    assert refusal(saved(), 2, SETTINGS, exact=False) == ""


@pytest.mark.parametrize(
    ("world_size", "now", "exact", "reason"),
    [
        (4, {"lr": 0.1}, False, "lr was 0.002 and is 0.1"),
        (2, {"effective_batch": 16}, False, "effective_batch was 32 and is 16"),
        (2, {}, True, "4 ranks and these are 2, but the same bits need the same sums"),
        (4, {"format": "fsdp"}, False, "format was whole and is fsdp"),
    ],
)
def test_what_would_be_another_training_is_refused(
    world_size: int, now: dict[str, Any], exact: bool, reason: str
) -> None:
    assert refusal(saved(), world_size, SETTINGS | now, exact=exact).endswith(reason)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"format": "deepspeed zero-2"}, "but each of its shards belongs to one process"),
        ({"format": "fsdp"}, "but each of its shards belongs to one process"),
        ({"dropout": 0.1}, "but each process has dropout of its own"),
    ],
)
def test_another_world_is_refused_where_it_has_no_meaning(
    settings: dict[str, Any], reason: str
) -> None:
    text = refusal(saved(**settings), 2, SETTINGS | settings, exact=False)
    assert text == f"it was saved by 4 ranks and these are 2, {reason}"
