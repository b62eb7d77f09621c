"""Rows of parquet files reach each rank once, whatever the files, and from any row on."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.road import EXAMPLES

pyarrow = pytest.importorskip("pyarrow", reason="the example needs the extra 'examples'")
sys.path.insert(0, str(EXAMPLES / "pretrain_parquet"))

import parquet_stream  # noqa: E402 - found through the line above
from parquet_stream import DataError, RowGroup, Stream, find_row_groups, read  # noqa: E402
from pyarrow import parquet  # noqa: E402

pytestmark = pytest.mark.torch  # its parts import torch


def write(path: Path, sizes: Sequence[int], first: int = 0) -> None:
    """Write a file of these row groups, whose prompts are numbers from `first` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("response", pyarrow.string())])
    with parquet.ParquetWriter(path, schema) as file:
        for size in sizes:
            numbers = range(first, first + size)
            columns = [[str(n) for n in numbers], [f"response {n}" for n in numbers]]
            file.write_table(pyarrow.table(columns, schema=schema), row_group_size=max(1, size))
            first += size


def write_set(directory: Path, files: Sequence[Sequence[int]]) -> list[RowGroup]:
    first = 0
    for number, sizes in enumerate(files):
        write(directory / f"{number}.parquet", sizes, first)
        first += sum(sizes)
    found: list[RowGroup] = find_row_groups(directory)
    return found


def streams(
    groups: list[RowGroup], world: int, rows_per_step: int, buffer: int, *, lanes: int = 0
) -> list[Stream]:
    return [
        Stream(
            groups=groups,
            rank=rank,
            world_size=world,
            lanes=lanes or world,
            effective_batch=rows_per_step * world,
            buffer_rows=buffer,
            seed=1,
        )
        for rank in range(world)
    ]


# Row groups beyond the 128 rows that are decoded at once, and some of one row.
FILES = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(files=FILES, world=st.integers(1, 4), rows=st.integers(1, 5), buffer=st.integers(1, 400))
def test_an_epoch_deals_each_row_to_one_rank_and_as_many_to_each(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    world: int,
    rows: int,
    buffer: int,
) -> None:
    groups = write_set(tmp_path_factory.mktemp("set"), files)
    total = sum(map(sum, files))
    if total < world * rows:
        with pytest.raises(DataError, match=rf"{total} rows are fewer than the {world * rows}"):
            streams(groups, world, rows, buffer)
        return
    dealt = [list(stream.rows(epoch=0)) for stream in streams(groups, world, rows, buffer)]
    assert {len(of_rank) for of_rank in dealt} == {total // (world * rows) * rows}
    seen = Counter(row for of_rank in dealt for row in of_rank)
    assert set(seen.values()) == {1}
    assert total - seen.total() < world * rows  # less than a step is left for another epoch
    assert set(seen) <= {(str(n), f"response {n}") for n in range(total)}


@settings(max_examples=40, deadline=None)
@given(files=FILES, buffer=st.integers(1, 400), data=st.data())
def test_from_any_step_on_the_stream_is_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], buffer: int, data: Any
) -> None:
    (stream,) = streams(write_set(tmp_path_factory.mktemp("set"), files), 1, 1, buffer)
    whole = list(stream.rows(epoch=3))
    step = data.draw(st.integers(0, len(whole)))
    assert list(stream.rows(epoch=3, step=step)) == whole[step:]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_in_another_world_each_step_has_the_same_rows_in_the_same_order(
    tmp_path: Path, lanes: int, world: int
) -> None:
    groups = write_set(tmp_path, [[100, 7], [50]])
    before, now = (
        [list(stream.rows(1, step=2)) for stream in streams(groups, size, 12 // size, 10, lanes=n)]
        for size, n in ((lanes, lanes), (world, lanes))
    )
    for step in range(13 - 2):
        rows = [
            [row for of_rank in ranks for row in of_rank[step * size : (step + 1) * size]]
            for ranks, size in ((before, 12 // lanes), (now, 12 // world))
        ]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 12


def test_rows_are_shuffled_and_each_epoch_is_another_order(tmp_path: Path) -> None:
    (stream,) = streams(write_set(tmp_path, [[100] * 4, [100] * 2]), 1, 8, 100)
    orders = [[str(piece) for piece in stream.pieces(epoch, 0, 0)] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    first, second = ([int(prompt) for prompt, _ in stream.rows(epoch)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(600))
    assert first != second
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(first)) < 60


def test_a_place_of_the_stream_is_named_by_file_row_group_and_row(tmp_path: Path) -> None:
    (piece,) = parquet_stream.pieces(write_set(tmp_path, [[100, 50]]), 120, 130)
    assert str(piece) == "0.parquet, row group 1, row 20"


def test_no_file_stays_open_between_rows_of_two_files(tmp_path: Path) -> None:
    rows = read(parquet_stream.pieces(write_set(tmp_path, [[1], [1], [1]]), 0, 3))
    for n in range(3):
        next(rows)
        links = [path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.exists()]
        assert [name for name in links if name.endswith(".parquet")] == [f"{n}.parquet"]


def test_the_fingerprint_is_that_of_names_rows_and_sizes(tmp_path: Path) -> None:
    one, same, other = (
        parquet_stream.fingerprint(write_set(tmp_path / name, files))
        for name, files in (("a", [[9], [3]]), ("b", [[9], [3]]), ("c", [[3], [9]]))
    )
    assert one == same != other


def test_what_is_wrong_with_a_file_is_one_line_before_the_training(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(DataError, match=r"has no \*\.parquet"):
        find_row_groups(tmp_path)
    write(path, [0])
    with pytest.raises(DataError, match=r"^the \*\.parquet in \S+ have no rows$"):
        find_row_groups(tmp_path)
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=r"^\S+a\.parquet is not a parquet file: [^\n]+$"):
        find_row_groups(tmp_path)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": ["b"]}), path)
    with pytest.raises(DataError, match=r"has no column 'response', only prompt, answer$"):
        find_row_groups(tmp_path)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "response": [1]}), path)
    with pytest.raises(DataError, match=r"column 'response' has int64 instead of text$"):
        find_row_groups(tmp_path)


def test_what_is_wrong_with_rows_is_one_line_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", None], "response": ["b", "c"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0 has a row without prompt$"):
        list(read(parquet_stream.pieces(find_row_groups(tmp_path), 0, 2)))
    write(path, [3000])
    groups, damaged = find_row_groups(tmp_path), bytearray(path.read_bytes())
    damaged[100:2000] = b"\xff" * 1900
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"^\S+a\.parquet can't be read: [^\n]+$"):
        list(read(parquet_stream.pieces(groups, 0, 3000)))
    path.unlink()
    with pytest.raises(DataError, match=r"^\S+a\.parquet can't be read: [^\n]+$"):
        list(read(parquet_stream.pieces(groups, 0, 3000)))
