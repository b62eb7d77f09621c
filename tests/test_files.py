"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from clusterrun.shared import files


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_and_private(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_text("old")
    files.write_whole(target, "new \udce9")
    assert target.read_bytes() == b"new \xe9"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(tmp_path) == ["a"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_whole(tmp_path / "taken", "text")
    assert names(tmp_path) == ["taken"]


def test_the_first_to_create_a_file_wins(tmp_path: Path) -> None:
    files.create(tmp_path / "claim", "node1\n")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "claim", "node2\n")
    assert (tmp_path / "claim").read_text() == "node1\n"
    assert names(tmp_path) == ["claim"]


def test_a_link_whose_answer_was_lost_counts_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(*args: Path) -> None:
        link(*args)
        raise FileExistsError

    monkeypatch.setattr(os, "link", repeated)
    files.create(tmp_path / "claim", "node1\n")
    assert names(tmp_path) == ["claim"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ud800", "[" * 100_000, "1" * 5000])
def test_what_is_no_json_object_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert files.read_json(path) is None
    assert files.read_json(tmp_path / "missing") is None
