"""The benchmarks of the logs, at a scale at which they say nothing but still must run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.diagnose import hang, score
from benchmarks.logs import corpus
from benchmarks.logs.corpus import Corpus
from clusterrun.node.forward.logfile import NodeLog
from clusterrun.node.forward.spool import Piece
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


# Others


@pytest.mark.long
@pytest.mark.torch  # DeepSpeed's estimator imports it
def test_each_command_is_measured_beside_the_floor(tmp_path: Path) -> None:
    (section,) = sections_of("plan", tmp_path, "--runs", "1")
    floor, *rows = section["rows"]
    assert (floor["command"], floor["over the floor"]) == ("python, nothing", 1)
    # Of processor time: other work on the machine changes the ratio of wall times.
    ratios = {row["command"]: row["cpu_s"] / floor["cpu_s"] for row in rows}
    assert set(ratios) > {"plan", "plan --json", "plan --what-if strategy", "plan --recommend"}
    assert ratios.pop("DeepSpeed's ZeRO-3 estimator") > 24  # it imports torch
    assert all(1 < ratio < 24 for ratio in ratios.values()), ratios


@pytest.mark.long
def test_every_way_of_reading_is_measured_and_written_down(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the example needs the extra 'examples'")
    options = ["--rows", "20", "--factors", "1", "--runs", "1"]
    sections = sections_of("reader", tmp_path, "--dir", tmp_path, *options)
    assert "| read_table |" in (tmp_path / "results.md").read_text()
    assert [section["title"] for section in sections] == [
        "Row groups of 1,000 rows",
        "One row group",
    ]
    for section in sections:
        ways = [row["way"] for row in section["rows"]]
        assert ways == ["nothing", "stream", "iter_batches", "read_table"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


# The benchmark of diagnose: its score of a few logs, and that its measurement still runs


LIMIT = "error: *** JOB 7 ON n1 CANCELLED AT 10:00 DUE TO TIME LIMIT ***\n"
LOGS = {
    "oom": ("cuda_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"),
    "limit": ("slurm_time_limit", LIMIT),
    "fine": ("benign_warning", "step 1 loss 2.5\n"),
}


def _written(root: Path, **logs: tuple[str, str]) -> Path:
    for name, (cause, text) in logs.items():
        (root / name).mkdir()
        (root / name / "log.txt").write_text(text)
        (root / name / "meta.json").write_text(json.dumps({"cause": cause}))
    return root


def test_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.run(_written(tmp_path, **LOGS), least=1.0) == 0
    assert "right 3 (100%)  wrong 0 (0%)  silent 0 (0%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cause", "text", "least"),
    [
        pytest.param("cuda_oom", "ZeroDivisionError\n", 0.95, id="too few are right"),
        pytest.param("benign_warning", LOGS["oom"][1], 0.0, id="a cause where nothing failed"),
    ],
)
def test_wrong_answers(tmp_path: Path, cause: str, text: str, least: float) -> None:
    assert score.run(_written(tmp_path, one=(cause, text)), least=least) == 1


@pytest.mark.long
def test_runs_of_many_ranks_are_measured(tmp_path: Path) -> None:
    argv = ("scale", "--runs", "1", "--dir", tmp_path)
    (section,) = sections_of("diagnose", tmp_path, *argv)
    assert len(section["rows"]) == 4
    assert all(row["peak_MB"] < 200 for row in section["rows"])
    (run,) = (tmp_path / "runs" / "hang64").iterdir()
    argv = [score.CLUSTERRUN, "diagnose", str(run), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["class"], verdict["ranks"]) == ("hang_rank_missing", str(hang.LATE))
