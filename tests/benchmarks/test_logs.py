"""The benchmarks of the logs, at a scale at which they say nothing but still must run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.logs import corpus
from benchmarks.logs.corpus import Corpus
from clusterrun.node.forward.logfile import NodeLog
from clusterrun.node.forward.stamp import Piece
from tests.benchmarks.running import sections_of

TINY = ("--scale", "1e-5", "--nodes", "3", "--runs", "1")
WITHOUT_ROOT = ("first", "size", "merge", "search", "torchx")  # dropping caches hurts others


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("corpus")
    return corpus.find_or_make(directory, "big", nodes=120, size_bytes=120 * 20_000)


def test_the_files_of_a_corpus_are_those_that_a_node_would_write(
    made: Corpus, tmp_path: Path
) -> None:
    theirs = [tmp_path / f"node.{end}" for end in ("log", "err")]
    writer = NodeLog(*theirs)
    *lines, last = Path(made.files[72]).read_bytes().split(b"\n")[:-1]
    for line in lines:
        at, rank, stream, text = line.split(b" ", 3)
        is_cut = stream.isupper()
        piece = Piece(text if is_cut else text + b"\n", is_cut=is_cut)
        writer.add(piece, int(at), rank.decode(), stream.decode().lower())
    at, _, _, text = last.split(b" ", 3)
    writer.add_end(1, text.decode().removeprefix("1 "), int(at))
    writer.flush()
    ours = [Path(made.files[72]).with_suffix(path.suffix) for path in theirs]
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]


def test_a_corpus_that_is_there_is_taken_again(made: Corpus, tmp_path: Path) -> None:
    first = corpus.find_or_make(tmp_path, "big", nodes=1, size_bytes=5000)
    again = corpus.find_or_make(tmp_path, "big", nodes=1, size_bytes=5000)
    other = corpus.find_or_make(tmp_path, "big", nodes=2, size_bytes=5000)
    assert (again, other.nodes) == (first, 2)
    corpus.remove(tmp_path)
    assert not tmp_path.exists()


def test_a_disk_that_is_too_small_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the corpus needs 1100000000"):
        corpus.find_or_make(tmp_path, "big", nodes=10, size_bytes=10**18)


@pytest.mark.long
def test_a_search_is_measured_and_written_down(tmp_path: Path) -> None:
    (section,) = sections_of("logs", tmp_path, "--dir", tmp_path, "read", "--only", "search", *TINY)
    assert section["title"] == "Search for a text"
    assert section["machine"]["scale"] == "1e-05 (10 GB scaled to 0 MB)"  # type: ignore[index]  # JSON


@pytest.mark.long
@pytest.mark.torch
def test_all_that_others_do_not_suffer_from_can_be_measured(tmp_path: Path) -> None:
    only = [word for name in WITHOUT_ROOT for word in ("--only", name)]
    sections = sections_of("logs", tmp_path, "--dir", tmp_path, "all", *only, *TINY)
    assert len(sections) == len(WITHOUT_ROOT) + 4
    burst = sections[-1]["rows"][0]  # type: ignore[index]  # JSON
    assert (burst["lost"], burst["twice"], burst["out_of_order"]) == (0, 0, 0)
