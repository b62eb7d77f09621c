"""All nodes' lines in one order, from files of any size and in any state."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import ClusterrunError
from clusterrun.logs.files import (
    LogFile,
    find_line_end,
    find_log_files,
    read_backward,
    read_forward,
)
from clusterrun.logs.lines import EVERYTHING, OVERVIEW, Selection
from clusterrun.logs.merge import read_merged
from clusterrun.paths import RunPaths
from tests.logs.corpus import T0, raw, texts, write_log


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path)


def test_lines_of_all_nodes_are_merged_by_time(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0 + 1, 0, "o", "a"), raw(T0 + 4, 0, "o", "d")])
    write_log(paths, 1, "n2", [raw(T0 + 2, 1, "o", "b"), raw(T0 + 3, 1, "e", "c")])
    assert texts(read_merged(paths, 1)) == ["a", "b", "c", "d"]


def test_equal_times_are_ordered_by_node_as_people_count_then_by_place(paths: RunPaths) -> None:
    for node in ("n10", "n9", "n2"):
        write_log(paths, 1, node, [raw(T0, 0, "o", f"{node} {i}") for i in range(2)])
    expected = ["n2 0", "n2 1", "n9 0", "n9 1", "n10 0", "n10 1"]
    assert texts(read_merged(paths, 1)) == expected
    assert texts(read_merged(paths, 1, tail=99)) == expected


def test_only_the_attempt_and_the_nodes_that_were_asked_for_are_read(paths: RunPaths) -> None:
    for attempt in (1, 2):
        for node in ("n1", "n2"):
            write_log(paths, attempt, node, [raw(T0, 0, "o", f"{attempt} {node}")])
    (paths.nccl_dir(2)).mkdir()
    assert texts(read_merged(paths, 2)) == ["2 n1", "2 n2"]
    assert texts(read_merged(paths, 1, nodes=frozenset({"n2", "n7"}))) == ["1 n2"]
    assert texts(read_merged(paths, 3)) == []


def test_overview_is_rank_0_the_launcher_and_what_went_wrong_elsewhere(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "step"), raw(T0 + 3, 1, "o", "other")])
    write_log(paths, 1, "n2", [raw(T0 + 1, 2, "e", "error"), raw(T0 + 2, None, "l", "launcher")])
    assert texts(read_merged(paths, 1, selection=OVERVIEW)) == ["step", "error", "launcher"]


_clock = st.lists(st.integers(0, 6), max_size=25).map(sorted)
_stream = st.sampled_from("oelO")


@st.composite
def _nodes(draw: st.DrawFn) -> dict[str, list[bytes]]:
    return {
        f"n{node}": [
            raw(T0 + t, draw(st.integers(0, 3)), draw(_stream), b"x" * draw(st.integers(0, 9)))
            for t in draw(_clock)
        ]
        for node in range(draw(st.integers(1, 4)))
    }


@given(_nodes(), st.integers(0, 30))
def test_tail_is_the_end_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, list[bytes]], count: int
) -> None:
    paths = RunPaths(root=tmp_path_factory.mktemp("run"))
    for node, lines in nodes.items():
        write_log(paths, 1, node, lines)
    for selection in (EVERYTHING, OVERVIEW, Selection(ranks=frozenset({9}))):
        whole = list(read_merged(paths, 1, selection=selection))
        assert whole == sorted(whole, key=lambda line: (line.epoch_us, line.node, line.offset))
        tail = list(read_merged(paths, 1, selection=selection, tail=count))
        assert tail == whole[max(len(whole) - count, 0) :]


@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(1, 40))
def test_any_bytes_read_the_same_in_both_directions_and_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], block: int
) -> None:
    content = b"\n".join([b"%d 0 o %s" % (T0 + i, chunk) for i, chunk in enumerate(chunks)])
    path = tmp_path_factory.mktemp("run") / "n1.log"
    path.write_bytes(content)
    file = LogFile(node="n1", path=path)
    whole = list(read_forward(file, start=0, end=len(content)))
    assert [line.text for line in whole if line.rank == 0] == [c.split(b"\n")[0] for c in chunks]
    assert all(content[line.offset :].startswith(b"17") for line in whole if line.rank == 0)
    assert list(read_forward(file, start=0, end=len(content), block_bytes=block)) == whole
    backward = list(read_backward(file, start=0, end=len(content), block_bytes=block))
    assert [(line.offset, line.text) for line in reversed(backward)] == [
        (line.offset, line.text) for line in whole
    ]
    ends = [content.rfind(b"\n", 0, end) + 1 for end in range(len(content) + 1)]
    assert [find_line_end(path, 0, end) for end in range(len(content) + 1)] == ends


def test_a_torn_last_line_is_shown(paths: RunPaths) -> None:
    path = write_log(paths, 1, "n1", [raw(T0, 0, "o", "whole"), raw(T0 + 1, 0, "o", "torn")])
    os.truncate(path, path.stat().st_size - 3)
    assert texts(read_merged(paths, 1)) == ["whole", "to"]
    assert texts(read_merged(paths, 1, tail=1)) == ["to"]


def test_a_torn_line_in_the_middle_keeps_its_place(paths: RunPaths) -> None:
    lines = [raw(T0, 0, "o", "a"), b"\x00\x00 torn\n", b"\n", raw(T0 + 2, 0, "o", "c")]
    write_log(paths, 1, "n1", lines)
    write_log(paths, 1, "n2", [raw(T0 + 1, 1, "o", "b")])
    assert texts(read_merged(paths, 1)) == ["a", "\x00\x00 torn", "b", "c"]


def test_the_last_lines_of_4_gib_come_at_once(paths: RunPaths) -> None:
    path = write_log(paths, 1, "n1", [])
    os.truncate(path, 4 * 1024**3)
    write_log(paths, 1, "n1", [b"\n", *(raw(T0 + i, 0, "o", f"step {i}") for i in range(300))])
    begin = time.perf_counter()
    assert texts(read_merged(paths, 1, tail=100)) == [f"step {i}" for i in range(200, 300)]
    assert time.perf_counter() - begin < 1


def test_files_whose_lines_are_all_older_are_not_read_to_their_beginning(paths: RunPaths) -> None:
    path = write_log(paths, 1, "n2", [])
    os.truncate(path, 4 * 1024**3)
    second = 1_000_000
    write_log(paths, 1, "n2", [b"\n", *(raw(T0 + i * second, 9, "o", "") for i in range(300))])
    write_log(paths, 1, "n1", [raw(T0 + i * second, 0, "o", f"step {i}") for i in range(300)])
    begin = time.perf_counter()
    shown = texts(read_merged(paths, 1, selection=OVERVIEW, tail=200))
    assert shown == [f"step {i}" for i in range(100, 300)]
    assert time.perf_counter() - begin < 1


def test_a_line_that_was_written_late_hides_none_of_those_before_it(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0 + 10 + i, 0, "o", f"old {i}") for i in range(10)])
    steps = [raw(T0 + 100 + i, 1, "o", f"step {i}") for i in range(20)]
    late = raw(T0, None, "a", "said before, written after")
    write_log(paths, 1, "n2", [*steps[:18], late, *steps[18:]])
    assert texts(read_merged(paths, 1, tail=10)) == [f"step {i}" for i in range(10, 20)]


def test_memory_is_bounded_over_many_files(paths: RunPaths) -> None:
    nodes, lines = 60, 8_000
    for node in range(nodes):
        write_log(
            paths, 1, f"n{node}", (raw(T0 + i * 10, node, "o", "x" * 100) for i in range(lines))
        )
    tracemalloc.start()
    seen = sum(1 for _ in zip(read_merged(paths, 1), range(60_000), strict=False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == 60_000
    assert peak < 100 * 1024**2


def test_a_file_without_newlines_does_not_fill_the_memory(paths: RunPaths) -> None:
    path = write_log(paths, 1, "n1", [])
    os.truncate(path, 64 * 1024**2)
    tracemalloc.start()
    assert sum(len(line.text) for line in read_merged(paths, 1)) == 64 * 1024**2
    assert len(list(read_merged(paths, 1, tail=1))) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024**2


def test_a_thousand_files_need_no_thousand_descriptors(paths: RunPaths) -> None:
    import resource

    for node in range(400):
        write_log(paths, 1, f"n{node}", [raw(T0 + node, node, "o", f"{node}")])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        assert texts(read_merged(paths, 1)) == [str(node) for node in range(400)]
        assert texts(read_merged(paths, 1, tail=2)) == ["398", "399"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_cannot_be_read_is_named(paths: RunPaths) -> None:
    path = paths.log(1, "n1")
    path.mkdir(parents=True)
    with pytest.raises(ClusterrunError) as caught:
        list(read_merged(paths, 1))
    assert caught.value.message == f"cannot read {path}"
    assert caught.value.cause == "Is a directory"


def test_names_of_nodes_may_hold_anything_a_file_name_may(paths: RunPaths) -> None:
    for node in ("gpu-a1.site", "n\udcff", "9" * 30):
        write_log(paths, 1, node, [raw(T0, 0, "o", "x")])
    assert {file.node for file in find_log_files(paths, 1)} == {"gpu-a1.site", "n\udcff", "9" * 30}
    assert len(list(read_merged(paths, 1))) == 3
