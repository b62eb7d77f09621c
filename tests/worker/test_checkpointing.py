"""Saving together: all ranks agree on what is saved, and a full disk ends no training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun import checkpointing
from clusterrun.errors import ClusterrunError
from clusterrun.runtime import Checkpoints


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "CLUSTERRUN_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLUSTERRUN_ATTEMPT", "3")
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr(checkpointing, "SHOWN_WITHIN_S", 0.1)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "out", settings={"effective_batch": 8})


def weights(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"weights")


def names(store: Checkpoints) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_what_was_saved_is_found_with_its_world_and_settings(store: Checkpoints) -> None:
    path = store.save(7, weights)
    found = store.newest()
    assert found is not None
    assert found.path == path == store.directory / "step-00000007"
    assert (found.step, found.world_size, found.attempt) == (7, 1, 3)
    assert found.settings == {"effective_batch": 8}
    assert (found.path / "model.bin").read_bytes() == b"weights"
    assert names(store) == ["step-00000007"]


def test_a_save_is_an_event(store: Checkpoints, tmp_path: Path) -> None:
    path = store.save(7, weights)
    (event,) = map(json.loads, (tmp_path / "spool" / "rank_0.events").read_text().splitlines())
    assert (event["type"], event["step"], event["path"]) == ("checkpoint", 7, str(path))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "out", keep=2)
    for step in (1, 2, 3):
        store.save(step, weights)
    assert names(store) == ["step-00000002", "step-00000003"]


def test_what_a_killed_save_left_is_removed_by_the_next(store: Checkpoints) -> None:
    (store.directory / ".step-00000005.a2.tmp").mkdir(parents=True)
    store.save(7, weights)
    assert names(store) == ["step-00000007"]


def test_a_step_that_is_saved_again_is_replaced(store: Checkpoints) -> None:
    store.save(7, weights)
    store.save(7, lambda folder: (folder / "other.bin").write_bytes(b"x"))
    found = store.newest()
    assert found is not None
    assert sorted(path.name for path in found.path.iterdir()) == [".complete", "other.bin"]
    assert names(store) == ["step-00000007"]


def test_a_newer_checkpoint_that_is_passed_over_is_said(
    store: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.directory / "step-00000007").mkdir(parents=True)
    assert store.newest() is None
    said = capsys.readouterr().err
    assert said.startswith("clusterrun: checkpoint step-00000007 is incomplete and passed over: ")


def plain(folder: Path) -> None:
    with open(folder / "full", "wb", buffering=0) as file:
        file.write(b"x")


def pickled(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(10_000)}, folder / "full")


def legacy(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save([torch.zeros(9)], folder / "full", _use_new_zipfile_serialization=False)


def through_a_file(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    with open(folder / "full", "wb", buffering=0) as file:
        torch.save({"a": torch.zeros(10_000)}, file)


def as_safetensors_says_it(_: Path) -> None:
    """What safetensors 0.8 raised on a full tmpfs; it would not write through a link."""
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    raise Exception(text)


@pytest.mark.parametrize("write", [plain, pickled, legacy, through_a_file, as_safetensors_says_it])
def test_a_full_disk_leaves_nothing_and_ends_nothing(
    store: Checkpoints, capfd: pytest.CaptureFixture[str], write: Callable[[Path], None]
) -> None:
    def write_on_a_full_disk(folder: Path) -> None:
        (folder / "full").symlink_to("/dev/full")
        write(folder)

    store.save(1, weights)
    assert store.save(2, write_on_a_full_disk) is None
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("clusterrun: step 2 was not saved: ")
    assert said.endswith(" (rank 0); training goes on")
    assert names(store) == ["step-00000001"]
    assert store.save(3, weights)


def test_a_disk_that_can_not_take_the_directory_is_said_before_anything_is_written(
    store: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert store.save(2, lambda _: pytest.fail("nothing can be written")) is None
    text = "clusterrun: step 2 was not saved: Disk quota exceeded (rank 0); training goes on\n"
    assert capsys.readouterr().err == text


def test_a_disk_without_room_for_another_one_is_said_before_anything_is_written(
    store: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(store.directory.parent)._replace(free=2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store.save(1, lambda folder: (folder / "large").write_bytes(b"x" * (3 << 20)))
    capsys.readouterr()
    assert store.save(2, lambda _: pytest.fail("nothing can be written")) is None
    said = capsys.readouterr().err
    assert said == (
        "clusterrun: step 2 was not saved: 3 MiB are needed, 2 MiB are free (rank 0); "
        "training goes on\n"
    )
    assert names(store) == ["step-00000001"]


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), PermissionError(13, "no")])
def test_other_errors_pass_through_and_claim_no_checkpoint(
    store: Checkpoints, error: Exception
) -> None:
    def fail(_: Path) -> None:
        raise error

    with pytest.raises(type(error)):
        store.save(2, fail)
    assert store.newest() is None


def test_the_runs_own_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="outside a run of clusterrun a directory must be given"):
        Checkpoints()
    monkeypatch.setenv("CLUSTERRUN_CHECKPOINT_DIR", str(tmp_path / "own"))
    assert Checkpoints().directory == tmp_path / "own"


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_ranks_that_have_not_joined_each_other_save_nothing(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterrunError, match="2 ranks save and resume together"):
        store.save(1, weights)


RANK = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from clusterrun import checkpointing
from clusterrun.runtime import Checkpoints
checkpointing.SHOWN_WITHIN_S = 0.1
rank = int(os.environ["RANK"])
meeting = f"file://{sys.argv[1]}/meeting"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
store = Checkpoints(sys.argv[2 + rank])
def shard(folder):
    (folder / f"shard_{rank}").write_text(str(rank))
def full(folder):
    shard(folder)
    if rank == 1:
        raise OSError(28, "No space left on device")
told = [store.newest() is None]
for step, write in ((1, shard), (2, full), (3, shard)):
    path = store.save(step, write)
    told.append(path and path.name)
newest = store.newest()
told += [newest.step, newest.world_size, sorted(file.name for file in newest.path.iterdir())]
print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""


def two_ranks(tmp_path: Path, *directories: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), *directories],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.torch
def test_two_ranks_agree_on_what_is_saved_and_what_is_newest(tmp_path: Path) -> None:
    ranks = [rank.communicate(timeout=100) for rank in two_ranks(tmp_path, "out", "out")]
    whole = [".complete", "shard_0", "shard_1"]
    expected = [True, "step-00000001", None, "step-00000003", 3, 2, whole]
    assert [json.loads(out) for out, _ in ranks] == [expected, expected], ranks
    said = "clusterrun: step 2 was not saved: No space left on device (rank 1); training goes on\n"
    assert said in ranks[0][1]
    assert "not saved" not in ranks[1][1]


@pytest.mark.torch
def test_a_directory_that_the_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, "mine", "yours")
    _, said = ranks[1].communicate(timeout=100)
    assert ranks[1].returncode == 1
    assert "is on rank 0's node and not on this one: checkpoints need a directory" in said
    ranks[0].kill()
    ranks[0].communicate()
    assert not list((tmp_path / "mine").glob("step-*"))
