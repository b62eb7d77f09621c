"""Checkpoints on disk: what is complete, which is taken, what is said of the rest, what may go."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.shared import checkpoint_files

SETTINGS = {"lr": 0.002, "effective_batch": 32}


def save(directory: Path, name: str, *, complete: bool = True, world_size: int = 4) -> Path:
    path = directory / name
    (path / "shards").mkdir(parents=True)
    (path / "model.bin").write_bytes(b"weights")
    (path / "shards" / "rank_1.bin").write_bytes(b"moments")
    if complete:
        step = int(name.rpartition("-")[2])
        about = {"world_size": world_size, "attempt": 2, "settings": SETTINGS}
        mark(path, step, **about)
    return path


def mark(path: Path, step: int, **about: Any) -> None:
    about = {"settings": {}, **about}
    checkpoint_files.mark(checkpoint_files.Checkpoint(path=path, step=step, **about))


def newest_name(directory: Path) -> tuple[str | None, list[str]]:
    found, notes = checkpoint_files.newest(directory)
    return (found.path.name if found else None), notes


def test_the_newest_complete_checkpoint_is_taken_with_all_that_was_said_of_it(
    tmp_path: Path,
) -> None:
    assert checkpoint_files.newest(tmp_path) == (None, [])
    assert checkpoint_files.newest(tmp_path / "none") == (None, [])
    save(tmp_path, "step-00000090")
    newest = save(tmp_path, "step-100000000")  # steps are numbers and not text
    save(tmp_path, "step-99999999")
    found, notes = checkpoint_files.newest(tmp_path)
    assert notes == []
    assert found
    assert found == checkpoint_files.Checkpoint(
        path=newest,
        step=100_000_000,
        world_size=4,
        attempt=2,
        saved_at=found.saved_at,
        settings=SETTINGS,
    )
    assert checkpoint_files.listed(tmp_path)[0] == (100_000_000, newest)


def test_the_marker_lists_every_file_and_names_its_schema(tmp_path: Path) -> None:
    path = save(tmp_path, "step-00000020")
    marker = json.loads((path / ".complete").read_text())
    assert marker["schema"] == "clusterrun.checkpoint/1"
    assert sorted(marker["files"]) == ["model.bin", "shards/rank_1.bin"]
    assert marker["files"]["model.bin"] == [7, zlib.crc32(b"weights")]
    mark(path, 20, world_size=4)  # it does not list its old marker
    assert newest_name(tmp_path) == ("step-00000020", [])


def flip_a_bit(path: Path) -> None:
    (path / "model.bin").write_bytes(b"weighty")


def make_unreadable(path: Path) -> None:
    (path / "model.bin").unlink()
    (path / "model.bin").symlink_to("model.bin")


def mark_otherwise(path: Path) -> None:
    marker = path / ".complete"
    marker.write_text(marker.read_text().replace("checkpoint/1", "checkpoint/2"))


NO_MARKERS = ("", "[]", "{}", '{"files": 3}', "\xff", '{"files": {"model.bin": 7}}')
HARM: dict[Callable[[Path], object], str] = {
    lambda path: (path / "shards" / "rank_1.bin").unlink(): "shards/rank_1.bin is missing",
    make_unreadable: "model.bin can't be read: Too many levels of symbolic links",
    lambda path: (path / "model.bin").write_bytes(b"wei"): "model.bin has 3 bytes instead of 7",
    flip_a_bit: "model.bin is damaged: its checksum differs from the saved one",
    lambda path: (
        path / ".complete"
    ).unlink(): "it has no .complete: the save did not finish, or another program wrote it",
    mark_otherwise: "its .complete has an unknown schema: clusterrun.checkpoint/2",
    **{
        lambda path, text=text: (path / ".complete").write_text(text, encoding="latin-1"): (
            "its .complete can't be read"
        )
        for text in NO_MARKERS
    },
}


def test_what_was_harmed_is_passed_over_and_said(tmp_path: Path) -> None:
    for number, (harm, why) in enumerate(HARM.items()):
        root = tmp_path / str(number)
        save(root, "step-00000010")
        harm(path := save(root, "step-00000020"))
        note = f"checkpoint step-00000020 is incomplete and was skipped: {why}"
        assert newest_name(root) == ("step-00000010", [note])
        assert checkpoint_files.listed(root) == [(20, path), (10, root / "step-00000010")]


def test_damage_at_the_ends_of_a_large_file_is_found_by_its_samples(tmp_path: Path) -> None:
    path = save(tmp_path, "step-00000020", complete=False)
    with open(path / "large.bin", "wb") as file:
        file.truncate(200 << 20)
    mark(path, 20, world_size=1)
    for place in (0, (200 << 20) - 1):
        for byte, name in ((b"x", None), (b"\0", "step-00000020")):
            with open(path / "large.bin", "r+b") as file:
                file.seek(place)
                file.write(byte)
            assert newest_name(tmp_path)[0] == name


def test_a_save_that_was_cut_off_is_never_seen_and_can_be_removed(tmp_path: Path) -> None:
    save(tmp_path, "step-00000020").rename(tmp_path / ".step-00000020.a3.tmp")
    (tmp_path / ".keep").mkdir()
    assert checkpoint_files.newest(tmp_path) == (None, [])
    checkpoint_files.set_unfinished_aside(tmp_path, attempt=3)
    [aside] = checkpoint_files.awaiting_removal(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".keep", aside.name}
    assert checkpoint_files.newest(tmp_path) == (None, [])


def test_what_a_later_attempt_is_writing_stays(tmp_path: Path) -> None:
    for attempt in (9, 10, 11):
        checkpoint_files.unfinished_directory(tmp_path, 20, attempt).mkdir()
    checkpoint_files.set_unfinished_aside(tmp_path, attempt=10)
    assert [*tmp_path.glob(".step-*.tmp")] == [tmp_path / ".step-00000020.a11.tmp"]
    assert len(checkpoint_files.awaiting_removal(tmp_path)) == 2


def test_a_checkpoint_saved_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, "step-00000020", complete=False)
    unfinished = checkpoint_files.unfinished_directory(tmp_path, 20, 3)
    unfinished.mkdir()
    (unfinished / "new.bin").write_bytes(b"new")
    final = checkpoint_files.step_directory(tmp_path, 20)
    checkpoint_files.publish(unfinished, final)
    assert [path.name for path in final.iterdir()] == ["new.bin"]
    assert not unfinished.exists()


def test_a_checkpoint_that_can_not_be_replaced_stays(tmp_path: Path) -> None:
    final = save(tmp_path, "step-00000020")
    with pytest.raises(FileNotFoundError):
        checkpoint_files.publish(tmp_path / "vanished", final)
    assert newest_name(tmp_path) == ("step-00000020", [])


def names(directory: Path) -> list[str]:
    return sorted(str(step) for step, _ in checkpoint_files.listed(directory))


def test_a_rank_looks_after_the_files_that_it_wrote() -> None:
    of_all = ["config.json", *(f"model-0000{n}-of-00012.safetensors" for n in range(1, 4))]
    for form in (
        "rng_state_{}.pth",
        "__{}_0.distcp",
        "model/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        "random_states_{}.pkl",
    ):
        every = sorted([*of_all, *map(form.format, range(12))])
        shares = [checkpoint_files.own_share(every, rank, 12) for rank in range(12)]
        assert all(form.format(rank) in share for rank, share in enumerate(shares))
        assert sorted(name for share in shares for name in share) == every
        assert max(map(len, shares)) == 2  # what is no rank's is spread


def test_pruning_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    for step in (10, 20, 40):
        save(tmp_path, f"step-{step:08d}")
    for step in (5, 30, 50):
        save(tmp_path, f"step-{step:08d}", complete=False)
    checkpoint_files.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["20", "30", "40", "50"]


def test_pruning_after_a_set_back_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    for step in (10, 15, 20):
        save(tmp_path, f"step-{step:08d}")
    flip_a_bit(tmp_path / "step-00000020")
    checkpoint_files.prune(tmp_path, keep=1, up_to=15)
    assert names(tmp_path) == ["15", "20"]


def saved_by(world_size: int, settings: dict[str, Any]) -> checkpoint_files.Checkpoint:
    return checkpoint_files.Checkpoint(
        path=Path("/c"), step=1, world_size=world_size, attempt=1, saved_at=0.0, settings=settings
    )


def test_a_changed_world_and_changed_settings_are_said() -> None:
    found = saved_by(4, SETTINGS)
    assert found.difference(4, SETTINGS) == ""
    assert found.difference(4, {**SETTINGS, "lr": 0.1}) == "lr was 0.002 and is 0.1"
    assert found.difference(2, {"effective_batch": 16, "seed": (1, 2)}) == (
        "effective_batch was 32 and is 16; lr was 0.002 and is None; "
        "seed was None and is [1, 2]; the number of ranks was 4 and is 2"
    )
    assert saved_by(4, {"betas": [0.9, 0.95]}).difference(4, {"betas": (0.9, 0.95)}) == ""


def test_what_is_overridden_or_any_world_is_no_difference() -> None:
    now = {**SETTINGS, "lr": 0.1, "effective_batch": 16}
    found = saved_by(4, SETTINGS)
    assert found.difference(None, now, override=["lr"]) == "effective_batch was 32 and is 16"
    assert found.difference(2, SETTINGS, override=["lr"]).startswith("the number of ranks was 4")
    with pytest.raises(ClusterrunError, match="no setting lrr, x to override") as refused:
        found.difference(4, SETTINGS, override=["x", "lr", "lrr"])
    assert refused.value.hints == ("use one of these settings: effective_batch, lr",)


def test_a_node_needs_room_for_its_own_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "step-00000001"
    saved.mkdir()
    for name, size in (("own", 900), ("fetched", 9000)):
        (saved / name).write_bytes(b"x" * size)
    nodes = {"h1": ["own"], "h2": ["fetched"]}
    mark(saved, 1, world_size=2, nodes=nodes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, free=900))
    for node in ("h1", "spare"):
        checkpoint_files.check_room(tmp_path, node)
    with pytest.raises(OSError, match="are needed"):
        checkpoint_files.check_room(tmp_path, "h2")
