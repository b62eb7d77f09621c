"""The newest lines are the last ones that a merge of everything would give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs import tail as newest_module
from clusterrun.logs.files import OpenFiles
from clusterrun.logs.merge import merge_sources
from tests.logs.corpus import T0, raw, texts
from tests.logs.reading import CORPORA, blocks_of, last, newest, sources, whole, write

BLOCKS = st.integers(1, 200)


@given(CORPORA, BLOCKS, st.integers(0, 60))
def test_the_newest_of_any_files_are_the_end_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, bytes], block: int, count: int
) -> None:
    chosen = sources(tmp_path_factory.mktemp("logs"), corpus)
    everything = list(merge_sources(chosen))
    with blocks_of(block):
        assert newest(chosen, count) == last(everything, count)


@given(CORPORA, BLOCKS, st.integers(0, 9), st.sampled_from([(), (b"loss=", b"x")]))
def test_so_are_the_newest_of_the_wanted_lines(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: dict[str, bytes],
    block: int,
    count: int,
    literals: tuple[bytes, ...],
) -> None:
    def takes(rank: int | None, stream: Stream) -> bool:
        return rank in (None, 1)

    def wants(line: LogLine) -> bool:
        return b"loss=" in line.text or b"x" in line.text

    directory = tmp_path_factory.mktemp("logs")
    chosen = [
        whole(source.file, takes=takes, wants=wants, literals=literals)
        for source in sources(directory, corpus)
    ]
    everything = list(merge_sources(chosen))
    with blocks_of(block):
        assert newest(chosen, count) == last(everything, count)


def _count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    original = OpenFiles.read

    def counted(self: OpenFiles, path: Path, offset: int, size: int) -> bytes:
        found = original(self, path, offset, size)
        read.append(len(found))
        return found

    monkeypatch.setattr(OpenFiles, "read", counted)
    return read


def test_a_hole_of_4_gib_before_the_newest_lines_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "n1", b"")
    os.truncate(file.path, 4 << 30)
    with file.path.open("ab") as log:
        log.write(b"\n" + b"".join(raw(T0 + i, 0, "o", f"{i}") for i in range(300)))
    read = _count_bytes(monkeypatch)
    assert texts(newest([whole(file)], 100)) == [str(i) for i in range(200, 300)]
    assert sum(read) < 100_000


def test_a_file_that_shrank_gives_what_is_left(tmp_path: Path) -> None:
    lines = [raw(T0 + i, 0, "o", f"{i:3}") for i in range(100)]
    source = whole(write(tmp_path, "n1", b"".join(lines)))
    os.truncate(source.file.path, 40 * len(lines[0]))
    for block in (10, 1000, 1 << 16):
        with blocks_of(block):
            assert texts(newest([source], 3)) == [" 37", " 38", " 39"]


def test_no_more_may_be_read_than_can_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest_module, "MAX_HELD_BYTES", 100_000)
    lines = [raw(T0 + i, 0, "o", f"{i} " + "x" * 1000) for i in range(1000)]
    source = whole(write(tmp_path, "n1", b"".join(lines)))
    tail = newest_module.find_newest([source], 500)
    found = list(tail)
    assert tail.cut == newest_module.Cut.LINES | newest_module.Cut.FULL
    assert 50 < len(found) < 200
    assert found == list(merge_sources([source]))[-len(found) :]
    assert newest_module.find_newest([source], 10).cut == newest_module.Cut.LINES
