"""Saving together: all ranks agree on what is saved, and a full disk ends no training."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.rank import emit, save_together
from clusterrun.runtime import Checkpoints
from clusterrun.shared import checkpoint_files
from tests.patience import patience
from tests.rank.parent import ranks


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "CLUSTERRUN_CHECKPOINT_DIR", "CLUSTERRUN_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLUSTERRUN_ATTEMPT", "3")
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr(save_together, "SHOWN_WITHIN_S", 0.1)
    emit.say_once.cache_clear()


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "out", settings={"effective_batch": 8})


def weights(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"weights")


def names(store: Checkpoints) -> list[str]:
    store._await_tidying()
    return sorted(path.name for path in store.directory.iterdir())


def events(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "spool" / "rank_0.events").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_newest_complete_checkpoint_is_found_with_its_world_and_settings(
    store: Checkpoints, tmp_path: Path
) -> None:
    (store.directory / ".step-00000005.a2.tmp").mkdir(parents=True)  # of a save that was killed
    assert store.newest() is None
    path, damaged = store.save(7, weights), store.save(8, weights)
    assert path
    assert damaged
    assert names(store) == [path.name, damaged.name]
    (damaged / "model.bin").write_bytes(b"damaged")
    found = store.newest()
    assert found is not None
    assert (found.path, found.step, found.world_size, found.attempt) == (path, 7, 1, 3)
    assert found.settings == {"effective_batch": 8}
    told = [(event["type"], event["step"]) for event in events(tmp_path)]
    assert told == [("resumed", 0), ("checkpoint", 7), ("checkpoint", 8), ("resumed", 7)]


def store_with(tmp_path: Path, *, override: Sequence[str] = (), **settings: object) -> Checkpoints:
    return Checkpoints(tmp_path / "out", settings=settings, override=override)


def test_a_setting_that_is_overridden_is_said_reported_and_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_with(tmp_path, lr=1e-4, batch=8).save(7, weights)
    store = store_with(tmp_path, override=["lr"], lr=5e-5, batch=8)
    assert store.resumable(overridable=["lr"])
    said = capsys.readouterr().err
    assert said == "clusterrun: resuming with lr 5e-05 instead of 0.0001 (override)\n"
    told = [event for event in events(tmp_path) if event["type"] == "overridden"]
    record = {"step": 7, "settings": {"lr": [1e-4, 5e-5]}}
    assert [{name: event[name] for name in record} for event in told] == [record]
    store.save(9, weights)
    # The same command line again: nothing is new, and what was is not forgotten.
    again = store_with(tmp_path, override=["lr"], lr=5e-5, batch=8)
    found = again.resumable(overridable=["lr"])
    assert found is not None
    assert (found.step, found.settings["lr"], found.overrides) == (9, 5e-5, (record,))
    assert capsys.readouterr().err == ""
    again.save(11, weights)
    last = again.newest()
    assert last is not None
    assert last.overrides == (record,)


OTHERS = [
    ({"lr": 5e-5}, (), None, "lr was 0.0001 and is 5e-05",
     "accept the change with --override lr; or start"),
    ({"effective_batch": 4, "lr": 5e-5}, ("lr",), None, "effective_batch was 8 and is 4",
     "accumulation x ranks = 8; or start anew"),
    ({"lr": 5e-5}, ("lr",), 2, "the number of ranks was 1 and is 2", "ranks at 1; or start anew"),
    ({}, ("width",), None, "can't override width", "override only lr"),
]  # fmt: skip


def test_another_training_is_refused_with_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"lr": 1e-4, "effective_batch": 8}
    store_with(tmp_path, **before).save(7, weights)
    for now, override, world_size, why, help_ in OTHERS:
        store = store_with(tmp_path, override=override, **{**before, **now})
        with pytest.raises(SystemExit) as refused:
            store.resumable(world_size, overridable=["lr"])
        reason, hint = str(refused.value).split("\n  hint: ")
        assert reason.startswith("error: can't ")
        assert (why in reason, help_ in hint) == (True, True), reason + hint
    assert "resuming with" not in capsys.readouterr().err


def test_no_rank_waits_while_old_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, may_go_on = Checkpoints(tmp_path / "out", keep=1), threading.Event()
    remove = shutil.rmtree

    def slow(path: Path) -> None:
        assert may_go_on.wait(60 * patience())
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", slow)
    for step in (1, 2, 3):
        assert store.save(step, weights)
    assert store.newest() is not None
    may_go_on.set()
    assert names(store) == ["step-00000003"]


def test_a_save_waits_for_the_room_that_old_checkpoints_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path / "out", keep=1)
    for step in (1, 2):
        store.save(step, weights)
    names(store)
    (store.directory / ".step-00000001.1.gone").mkdir()

    def free(directory: Path) -> object:
        is_full = checkpoint_files.awaiting_removal(directory) != []
        return SimpleNamespace(total=100, free=0 if is_full else 100)

    monkeypatch.setattr(shutil, "disk_usage", free)
    assert store.save(3, weights)


def plain(folder: Path) -> None:
    with open(folder / "full", "wb", buffering=0) as file:
        file.write(b"x")


def pickled(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(10_000)}, folder / "full")


def as_safetensors_says_it(_: Path) -> None:
    """What safetensors 0.8 raised on a full tmpfs; it would not write through a link."""
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    raise Exception(text)


@pytest.mark.parametrize("write", [plain, pickled, as_safetensors_says_it])
def test_a_full_disk_leaves_nothing_and_ends_nothing(
    store: Checkpoints,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
) -> None:
    def write_on_a_full_disk(folder: Path) -> None:
        (folder / "full").symlink_to("/dev/full")
        write(folder)

    store.save(1, weights)
    assert store.save(2, write_on_a_full_disk) is None
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("clusterrun: step 2 was not saved: ")
    assert said.endswith(" (rank 0); training continues")
    told = events(tmp_path)[-1]
    assert said == f"clusterrun: step 2 was not saved: {told['reason']}; training continues"
    assert (told["type"], told["step"]) == ("unsaved", 2)
    assert names(store) == ["step-00000001"]
    assert store.save(3, weights)


def test_a_disk_without_room_for_another_one_is_said_before_anything_is_written(
    store: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(store.directory.parent)._replace(free=2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store.save(1, lambda folder: (folder / "large").write_bytes(b"x" * (3 << 20)))
    capsys.readouterr()
    assert store.save(2, lambda _: pytest.fail("nothing can be written")) is None
    assert capsys.readouterr().err == (
        "clusterrun: step 2 was not saved: 3 MiB are needed, 2 MiB are free (rank 0); "
        "training continues\n"
    )
    assert names(store) == ["step-00000001"]


def test_a_file_system_that_syncs_no_directories_keeps_checkpoints(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert store.save(1, weights)


def test_a_directory_that_can_not_be_listed_makes_no_complete_checkpoint(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("shards"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return scan(path)

    def write(folder: Path) -> None:
        (folder / "shards").mkdir()
        weights(folder / "shards")
        monkeypatch.setattr(os, "scandir", refuse)

    assert store.save(1, write) is None
    monkeypatch.undo()
    assert "Stale file handle (rank 0); training continues" in capsys.readouterr().err
    assert store.newest() is None


def test_a_save_that_wrote_nothing_is_an_error_and_costs_no_older_one(store: Checkpoints) -> None:
    store.save(1, weights)
    with pytest.raises(ClusterrunError) as error:
        store.save(2, lambda _: None)
    said = str(error.value)  # a traceback shows no hint
    assert said.startswith(f"step 2 was not saved: nothing was written to {store.directory}/")
    assert said.endswith("automatic_checkpoint_naming: it writes elsewhere)")
    assert names(store) == ["step-00000001"]


class WholeModel:
    """What operator.index() takes, as a tensor or NumPy's numbers are."""

    def __index__(self) -> int:
        return 7

    def __str__(self) -> str:
        return "tensor(7)"


def test_a_step_is_a_whole_number_of_any_kind(store: Checkpoints, tmp_path: Path) -> None:
    assert store.save(WholeModel(), weights) == store.directory / "step-00000007"  # type: ignore[arg-type]
    found = store.newest()
    assert found is not None
    assert found.step == events(tmp_path)[0]["step"] == 7
    with pytest.raises(TypeError, match="float"):
        store.save(8.0, weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        Checkpoints(tmp_path, keep=0)


def test_other_errors_pass_through_and_claim_no_checkpoint(store: Checkpoints) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        store.save(2, fail)
    assert store.newest() is None


def test_ranks_that_have_not_joined_each_other_save_nothing(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterrunError, match="has not joined the 2 ranks with which"):
        store.save(1, weights)
    with pytest.raises(ValueError, match="outside a run of clusterrun, a directory is required"):
        Checkpoints()


def test_an_attempt_that_is_superseded_publishes_and_writes_nothing(
    store: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slurm started the job again, and these ranks of the third attempt run on."""
    monkeypatch.setenv("CLUSTERRUN_RUN_DIR", str(tmp_path))
    (tmp_path / "attempts" / "3").mkdir(parents=True)

    def write(folder: Path) -> None:
        weights(folder)
        (tmp_path / "attempts" / "4").mkdir()
        (store.directory / ".step-00000002.a4.tmp").mkdir()

    assert store.save(1, weights)
    assert store.save(2, write) is None
    assert store.save(3, lambda _: pytest.fail("nothing may be written")) is None
    late = "clusterrun: attempt 4 of this run has begun: attempt 3 no longer saves\n"
    assert capsys.readouterr().err == late
    assert names(store) == [".step-00000002.a4.tmp", "step-00000001"]


SHARES = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from clusterrun.rank import save_together as checkpointing
from clusterrun.shared import checkpoint_files as checkpoints
from clusterrun.runtime import Checkpoints
checkpointing.SHOWN_WITHIN_S = 0.1
rank = int(os.environ["RANK"])
meeting = f"file://{sys.argv[1]}/meeting"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
store = Checkpoints("out", keep=3)
told = {}
read, checksum, breaks = [], checkpoints.checksum, False
def noted(file):
    if breaks:
        raise RuntimeError("can't start new thread")
    read.append(file.name)
    return checksum(file)
checkpoints.checksum = noted
def shard(folder):
    for kind in ("model", "optim"):
        (folder / f"{kind}_{rank}").write_text(f"{kind} {rank}")
def step(path):
    return path and int(path.name.rpartition("-")[2])
def newest():
    try:
        found = store.newest()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found and found.step
def harm(at, *names):
    dist.barrier()
    if rank == 0:
        for name in names:
            (Path("out") / f"step-{at:08d}" / name).write_text("x" * len("model 0"))
    dist.barrier()

def full(folder):
    shard(folder)
    if rank == 1:
        raise OSError(28, "No space left on device")
def together(folder):
    if rank == 1:
        (folder / "full").symlink_to("/dev/full")
        torch.save([0], folder / "full", _use_new_zipfile_serialization=False)
    dist.barrier()  # as DeepSpeed waits for all

told["full"] = [step(store.save(1, write)) for write in (full, together)]
told["saved"] = [step(store.save(n, shard)) for n in (1, 2)]
told["settled"] = sorted(read)
read.clear()
told["newest"] = newest()
told["read"] = sorted(read)
breaks = rank == 2
told["unsettled"] = step(store.save(3, shard))
told["unread"] = newest()
breaks = False
told["settled again"] = step(store.save(3, shard))
is_listed = checkpointing._is_listed
if rank == 1:  # as on a node with another disk at this place
    checkpointing._is_listed = lambda path: False
told["unshared"] = newest()
checkpointing._is_listed = is_listed
harm(3, "optim_2", "model_1")
told["newest but damaged"] = newest()
harm(2, "optim_1")
told["all damaged"] = newest()
if rank == 0:
    Path("attempts/2").mkdir(parents=True)
    os.environ["CLUSTERRUN_RUN_DIR"] = os.getcwd()
told["superseded"] = step(store.save(4, shard))
print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""

Three = tuple[Path, list[dict[str, Any]], str]


@pytest.fixture(name="three", scope="module")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Three:
    """What three ranks were told, and what rank 0 said, in the course of SHARES."""
    folder = tmp_path_factory.mktemp("three")
    told = ranks(["-c", SHARES, str(folder)], [folder] * 3)
    assert [err for _, err in told[1:] if "clusterrun:" in err] == []
    return folder, [json.loads(out) for out, _ in told], told[0][1]


@pytest.mark.torch
def test_each_rank_handles_its_share_and_each_file_is_read_once(three: Three) -> None:
    folder, told, _ = three
    assert [t["saved"] for t in told] == [[1, 2]] * 3
    for what, times in (("settled", 2), ("read", 1)):
        shares = [t[what] for t in told]
        assert shares == [sorted([f"model_{n}", f"optim_{n}"] * times) for n in range(3)]
    files = json.loads((folder / "out/step-00000001/.complete").read_text())["files"]
    assert list(files) == [f"{kind}_{rank}" for kind in ("model", "optim") for rank in range(3)]
    assert checkpoint_files.read(folder / "out/step-00000001").world_size == 3


@pytest.mark.torch
def test_what_fails_on_one_rank_is_the_answer_on_all(three: Three) -> None:
    folder, told, said = three
    broken = "RuntimeError: can't start new thread (rank 2)"
    answers = {
        "full": [None, None],
        "unsettled": None,
        "settled again": 3,
        "unread": f"ClusterrunError: step-00000002 can't be read: {broken}",
        "superseded": None,
    }
    assert [{name: t[name] for name in answers} for t in told] == [answers] * 3
    place = f"{folder}/out/step-00000003 exists on rank 0's node but not on this one"
    (unshared,) = {t["unshared"] for t in told}
    assert unshared.startswith(f"ClusterrunError: step-00000003 can't be read: {place}")
    disk = "step 1 was not saved: No space left on device (rank 1); training continues\n"
    assert said.count(f"clusterrun: {disk}") == 2
    assert f"clusterrun: step 3 was not saved: {broken}; training continues\n" in said
    assert said.count("attempt 2 of this run has begun: attempt 1 no longer saves") == 1
    assert not (folder / "out/step-00000004").exists()


@pytest.mark.torch
def test_what_one_rank_finds_damaged_is_passed_over_by_all_with_the_words_of_one(
    three: Three,
) -> None:
    folder, told, said = three
    found = [(t["newest"], t["newest but damaged"], t["all damaged"]) for t in told]
    assert found == [(2, 2, 1)] * 3
    newest, notes = checkpoint_files.newest(folder / "out")
    assert newest is not None
    assert newest.step == 1
    lines = [line for line in said.splitlines() if "was skipped" in line]
    assert lines == [f"clusterrun: {note}" for note in (notes[0], *notes)]
    assert "model_1 is damaged" in notes[0]
