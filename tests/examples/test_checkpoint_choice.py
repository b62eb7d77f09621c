"""Which checkpoint a resume takes, and when it takes none."""

import json
from pathlib import Path
from typing import Any

import pytest
import whole_checkpoints as checkpoints


def save(output: Path, step: int, *, complete: bool = True) -> Path:
    path = checkpoints.step_directory(output, step)
    (path / "shards").mkdir(parents=True)
    (path / "model.bin").write_bytes(b"weights")
    (path / "shards" / "rank_1.bin").write_bytes(b"moments")
    if complete:
        checkpoints.mark_complete(path)
    return path


def test_an_empty_or_missing_output_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoints.newest_checkpoint(tmp_path) == (None, [])
    assert checkpoints.newest_checkpoint(tmp_path / "none") == (None, [])


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 90)
    newest = save(tmp_path, 100)
    assert checkpoints.newest_checkpoint(tmp_path) == (newest, [])


def test_an_unmarked_newest_checkpoint_is_skipped_and_said(tmp_path: Path) -> None:
    older = save(tmp_path, 10)
    save(tmp_path, 20, complete=False)
    assert checkpoints.newest_checkpoint(tmp_path) == (
        older,
        [
            "checkpoint step-00000020 is incomplete and skipped: "
            "it has no .complete: the run ended while it was being saved"
        ],
    )


def test_a_marked_checkpoint_that_lost_a_shard_is_skipped(tmp_path: Path) -> None:
    (save(tmp_path, 20) / "shards" / "rank_1.bin").unlink()
    path, notes = checkpoints.newest_checkpoint(tmp_path)
    assert path is None
    assert notes[0].endswith("skipped: shards/rank_1.bin is missing")


def test_a_marked_checkpoint_with_a_short_file_is_skipped(tmp_path: Path) -> None:
    (save(tmp_path, 20) / "model.bin").write_bytes(b"wei")
    path, notes = checkpoints.newest_checkpoint(tmp_path)
    assert path is None
    assert notes[0].endswith("skipped: model.bin has 3 bytes instead of 7")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "\xff"])
def test_a_marker_that_is_no_marker_is_skipped(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 20) / ".complete").write_text(text, encoding="latin-1")
    path, notes = checkpoints.newest_checkpoint(tmp_path)
    assert path is None
    assert notes[0].endswith("skipped: its .complete can't be read")


def test_a_save_that_was_cut_off_is_never_seen(tmp_path: Path) -> None:
    save(tmp_path, 20).rename(tmp_path / ".step-00000020.tmp")
    assert checkpoints.newest_checkpoint(tmp_path) == (None, [])


def test_pruning_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    for step in (10, 20, 40):
        save(tmp_path, step)
    for step in (5, 30, 50):
        save(tmp_path, step, complete=False)
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(checkpoints.saved_steps(tmp_path)) == [20, 30, 40, 50]


def test_pruning_without_a_complete_checkpoint_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 30, complete=False)
    checkpoints.prune(tmp_path, keep=1)
    assert list(checkpoints.saved_steps(tmp_path)) == [30]


def state(world_size: int = 4, **changes: Any) -> dict[str, Any]:
    settings = {"lr": 0.002, "effective_batch": 32, "format": "whole", "dropout": 0.0} | changes
    return {"world_size": world_size, "settings": settings}


def test_the_same_run_may_resume() -> None:
    assert checkpoints.refusal(json.loads(json.dumps(state())), state(), exact=True) is None


def test_another_world_with_the_same_batch_may_resume_whole_checkpoints() -> None:
    assert checkpoints.refusal(state(4), state(2), exact=False) is None


@pytest.mark.parametrize(
    ("now", "exact", "reason"),
    [
        (state(lr=0.1), False, "lr was 0.002 and is 0.1"),
        (state(2, effective_batch=16), False, "effective_batch was 32 and is 16"),
        (state(2), True, "4 processes and these are 2, but the same bits need the same sums"),
        (state(format="fsdp"), False, "format was whole and is fsdp"),
    ],
)
def test_what_would_be_another_training_is_refused(
    now: dict[str, Any], exact: bool, reason: str
) -> None:
    assert (checkpoints.refusal(state(), now, exact=exact) or "").endswith(reason)


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
    refusal = checkpoints.refusal(state(4, **settings), state(2, **settings), exact=False)
    assert refusal == f"it was saved by 4 processes and these are 2, {reason}"
