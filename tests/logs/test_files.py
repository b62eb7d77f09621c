"""Finding log files and reading stretches of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.logs.files import FileKind, OpenFiles, find_files
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import write_log


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    for node in ("n10", "n2", "n\udcff"):
        write_log(paths, 1, node, [b"x\n"])
    for node in ("n10", "n\udcff"):
        paths.log_errors(1, node).unlink()
    paths.nccl_log(1, "n2").parent.mkdir()
    return paths


def test_logs_are_found_in_the_order_people_count_in(paths: RunPaths) -> None:
    assert [file.node for file in find_files(paths, 1)] == ["n2", "n10", "n\udcff", "n2"]
    assert [file.node for file in find_files(paths, 1, frozenset({"n10", "n7"}))] == ["n10"]
    assert find_files(paths, 2) == []


def test_each_file_says_what_it_holds(paths: RunPaths) -> None:
    world = {"schema": "clusterrun.world/1", "nodes": ["n2", "n10"], "procs_per_node": 4}
    paths.world(1).write_text(json.dumps(world))
    _, log, unknown, side = find_files(paths, 1)
    assert (log.kind, log.ranks) == (FileKind.LOG, range(4, 8))
    assert (side.kind, side.ranks, side.path) == (
        FileKind.ERRORS,
        range(4),
        paths.log_errors(1, "n2"),
    )
    assert unknown.ranks is None


def test_a_directory_that_cannot_be_read_is_named(paths: RunPaths) -> None:
    paths.logs_dir.joinpath("a2").write_bytes(b"")
    with pytest.raises(ClusterrunError) as caught:
        find_files(paths, 2)
    assert caught.value.message == f"cannot read {paths.logs_dir / 'a2'}"


def test_descriptors_are_kept_and_given_back(paths: RunPaths) -> None:
    path = paths.log(1, "n2")
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles(1) as files:
        assert files.read(path, 0, 9) == b"x\n"
        path.unlink()
        assert files.read(path, 1, 9) == b"\n"
        assert files.read(path, 2, 9) == b""
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
