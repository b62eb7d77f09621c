"""All nodes' lines in one order: as the slow way gives them, whatever the blocks and the damage."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs import merge
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import FileKind, OpenFiles
from tests.logs.corpus import T0, raw, texts
from tests.logs.reading import (
    CORPORA,
    as_whole,
    blocks_of,
    last,
    merged,
    newest,
    sources,
    whole,
    write,
)
from tests.patience import patience

BLOCKS = st.integers(1, 200)
HELD = st.sampled_from([0, 3000, 1 << 26])


@given(CORPORA, BLOCKS, HELD)
def test_any_files_are_merged_as_sorting_all_their_lines_would(
    tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, bytes], block: int, held: int
) -> None:
    directory = tmp_path_factory.mktemp("logs")
    with blocks_of(block, held):
        assert list(merge_sources(sources(directory, corpus))) == merged(corpus)


@given(CORPORA, BLOCKS, st.sampled_from([(b"x",), (b"xxx", b"loss="), (b" 3 o",), (b"\0\0",)]))
def test_literals_only_save_time(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: dict[str, bytes],
    block: int,
    literals: tuple[bytes, ...],
) -> None:
    def wants(line: LogLine) -> bool:
        return any(literal in line.text for literal in literals)

    directory = tmp_path_factory.mktemp("logs")
    chosen = [
        whole(source.file, wants=wants, literals=literals) for source in sources(directory, corpus)
    ]
    with blocks_of(block):
        wanted = [line for line in merged(corpus) if wants(line)]
        assert list(merge_sources(chosen)) == [as_whole(line) for line in wanted]


def test_lines_of_one_node_from_two_files_go_by_their_place_in_its_log(tmp_path: Path) -> None:
    parts = [raw(T0, i % 2, "o", f"{i}") for i in range(6)]
    places = [sum(map(len, parts[:i])) for i in range(6)]
    log = write(tmp_path, "n1", b"".join(parts))
    side = write(
        tmp_path,
        "n1",
        b"".join(raw(T0, 1, "o", f"error {places[i]} {i}") for i in (1, 3, 5)),
        FileKind.ERRORS,
    )
    chosen = [whole(side), whole(log, takes=lambda rank, stream: rank == 0)]
    for block in (1, 30, 10_000):
        with blocks_of(block):
            assert texts(merge_sources(chosen)) == ["0", "1", "2", "3", "4", "5"]


def test_a_line_that_is_too_long_comes_in_pieces_of_the_same_size_for_any_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "MAX_LINE_BYTES", 50)
    file = write(tmp_path, "n1", raw(T0, 0, "o", "a" * 100) + raw(T0, 0, "o", "b"))
    for block in (1, 7, 50, 1000):
        with blocks_of(block):
            found = list(merge_sources([whole(file)]))
        assert [len(line.text) for line in found] == [29, 50, 21, 1]
        assert [line.offset for line in found] == [0, 50, 100, 122]


def test_a_file_that_shrinks_while_it_is_read_ends_there(tmp_path: Path) -> None:
    lines = [raw(T0 + i, 0, "o", f"{i}") for i in range(100)]
    file = write(tmp_path, "n1", b"".join(lines))
    with blocks_of(len(lines[0])):
        reading = merge_sources([whole(file)])
        assert next(reading).text == b"0"
        os.truncate(file.path, len(b"".join(lines[:30])) + 5)
        rest = list(reading)
    assert rest[-1].text == b"17000"


def test_a_file_that_is_gone_has_no_lines(tmp_path: Path) -> None:
    gone, there = (write(tmp_path, node, raw(T0, 0, "o", node)) for node in ("n1", "n2"))
    chosen = [whole(gone), whole(there)]
    gone.path.unlink()
    assert texts(merge_sources(chosen)) == ["n2"]


def test_lines_that_nobody_stamped_have_no_time(tmp_path: Path) -> None:
    file = write(tmp_path, "n1", b"first\n\n" + raw(T0, 0, "o", "last"), FileKind.PLAIN)
    found = list(merge_sources([whole(file)]))
    assert {line[:4] for line in found} == {(0, "n1", None, Stream.OUT)}
    assert [line.offset for line in found] == [0, 6, 7]
    assert found[2].text == raw(T0, 0, "o", "last").rstrip()


def test_few_descriptors_are_enough_for_many_files(tmp_path: Path) -> None:
    corpus = {f"n{i}": raw(T0 + i, i, "o", f"{i}") for i in range(300)}
    chosen = sources(tmp_path, corpus)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        assert texts(merge_sources(chosen)) == [str(i) for i in range(300)]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_READ_ALL = """
import resource, sys
from pathlib import Path
from clusterrun.logs.sources import FileKind, LogFile
from clusterrun.logs.merge import find_newest, merge_sources
from clusterrun.logs.sources import Source
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if sys.argv[2] == "few":
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
paths = Path(sys.argv[1]).iterdir()
files = [LogFile(node=path.stem, path=path, kind=FileKind(path.suffix[1:])) for path in paths]
sources = [Source(file=file, start=0, end=file.path.stat().st_size) for file in files]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = merge_sources if len(sys.argv) < 4 else lambda s: find_newest(s, int(sys.argv[3]))
count = sum(1 for _ in read(sources))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _read_all(directory: Path, *options: str) -> tuple[int, int]:
    """Count the lines of all files, and the KiB that reading them took."""
    argv = [sys.executable, "-c", _READ_ALL, str(directory), *options]
    said = subprocess.check_output(argv, text=True, timeout=100 * patience())
    count, grown_kib = map(int, said.split())
    return count, grown_kib


@pytest.mark.parametrize("descriptors", ["few", "all"])
def test_memory_is_bounded_over_files_of_very_different_size(
    tmp_path: Path, descriptors: str
) -> None:
    text = "x" * 40
    for node in range(200):
        lines = [raw(T0 + i * 1000, node, "o", text) for i in range(300)]
        (tmp_path / f"n{node}.log").write_bytes(b"".join(lines))
    burst = raw(T0 + 150_000, 7, "o", text) * 300_000
    (tmp_path / "n7.log").write_bytes(burst)
    count, grown_kib = _read_all(tmp_path, descriptors)
    assert count == 199 * 300 + 300_000
    assert grown_kib < 110 * 1024


@pytest.mark.parametrize(
    ("kind", "nodes", "most_mib"),
    [(FileKind.LOG, 100, 90), pytest.param(FileKind.PLAIN, 250, 140, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("tail", [(), ("9",), ("2000",)])
def test_memory_is_bounded_over_files_with_long_lines(
    tmp_path: Path, kind: FileKind, nodes: int, most_mib: int, tail: tuple[str, ...]
) -> None:
    for node in range(nodes):
        path = tmp_path / f"n{node}.{kind.value}"
        path.touch()
        os.truncate(path, 900_000)
        with path.open("ab") as file:
            file.write(b"\n" + raw(T0 + node, 0, "o", "x"))
        os.truncate(path, 1_800_000)
    count, grown_kib = _read_all(tmp_path, "all", *tail)
    assert 0 < count <= (9 if tail == ("9",) else 3 * nodes)
    assert count == 3 * nodes or tail, "all lines are read; of the last ones, what memory holds"
    assert grown_kib < most_mib * 1024


# The newest lines are the last ones that a merge of everything would give


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
    monkeypatch.setattr(merge, "MAX_HELD_BYTES", 100_000)
    lines = [raw(T0 + i, 0, "o", f"{i} " + "x" * 1000) for i in range(1000)]
    source = whole(write(tmp_path, "n1", b"".join(lines)))
    tail = merge.find_newest([source], 500)
    found = list(tail)
    assert tail.is_cut
    assert 50 < len(found) < 200
    assert found == list(merge_sources([source]))[-len(found) :]
    assert merge.find_newest([source], 10).is_cut
