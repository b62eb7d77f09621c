"""Which files belong to a job that clusterrun did not start: real files in real directories."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.backends import foreign as slurm
from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.foreign import ForeignPart
from clusterrun.errors import ClusterrunError, SchedulerUnreachableError
from clusterrun.logs.filename_pattern import find_pattern_files
from clusterrun.logs.foreign import ForeignFile, ask_state, find_foreign, look_again, name_files
from clusterrun.logs.siblings import read_tasks
from clusterrun.paths import RunPaths
from clusterrun.state import JobState

Row = tuple[str, str, int | None, str]


def make_part(workdir: Path, **changes: Any) -> ForeignPart:
    job = SchedulerJob(
        job_id="4711",
        state=JobState.RUNNING,
        source="scontrol",
        nodelist="node[1-2]",
        start=1_000_000_000.0,
    )
    values: dict[str, Any] = {
        "job": dataclasses.replace(job, **changes.pop("job", {})),
        "label": "4711",
        "name": "gpt",
        "user": "me",
        "workdir": workdir,
        "stdout": str(workdir / "slurm-4711.out"),
        "array_job_id": "4711",
        "array_task_id": "",
    }
    values |= changes
    return ForeignPart(**{"stderr": values["stdout"], **values})


def touch(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[ForeignPart]:
    """The parts that Slurm will say there are."""
    parts: list[ForeignPart] = []
    monkeypatch.setattr(slurm, "ask", lambda job_id: list(parts))
    return parts


def rows(directory: Path, text: str = "4711") -> list[Row]:
    job = find_foreign(text, directory)
    assert job is not None
    return [
        (file.label, str(file.path.relative_to(directory)), file.rank, file.stream.label)
        for file in job.files
    ]


def test_the_batch_output_is_one_source_that_is_named_after_the_job(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path))
    touch(tmp_path, "slurm-4711.out", "slurm-47110.out", "slurm-471.out", "train.py")
    assert rows(tmp_path) == [("4711", "slurm-4711.out", None, "out")]


def test_separate_stderr_is_a_source_of_its_own(tmp_path: Path, known: list[ForeignPart]) -> None:
    known.append(make_part(tmp_path, stderr=str(tmp_path / "4711.problems")))
    touch(tmp_path, "slurm-4711.out", "4711.problems")
    assert rows(tmp_path) == [
        ("4711", "slurm-4711.out", None, "out"),
        ("4711", "4711.problems", None, "err"),
    ]


def test_sruns_files_per_task_are_found_by_the_scripts_pattern(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    patterns = (("l/%x-%4t.log", False), ("l/%x-%4t.bad", True))
    known.append(make_part(tmp_path, step_patterns=patterns))
    touch(tmp_path, "l/gpt-0000.log", "l/gpt-0001.log", "l/gpt-0001.bad", "l/gpt-last.log")
    assert rows(tmp_path) == [
        ("4711", "l/gpt-0000.log", 0, "out"),
        ("4711", "l/gpt-0001.log", 1, "out"),
        ("4711", "l/gpt-0001.bad", 1, "err"),
    ]


def test_sruns_files_per_node_are_named_after_the_node(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path, step_patterns=(("%N-%J.txt", False), ("%j.n%n", False))))
    touch(tmp_path, "node2-4711.0.txt", "4711.n0", "4711.n1")
    assert rows(tmp_path) == [
        ("node2", "node2-4711.0.txt", None, "out"),
        ("node1", "4711.n0", None, "out"),
        ("node2", "4711.n1", None, "out"),
    ]


def test_sruns_files_per_task_are_found_by_the_jobs_number_where_no_pattern_is_known(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path))
    touch(tmp_path, "slurm-4711.out", "out-4711-0.log", "out-4711-1.log", "out-4712-0.log")
    assert rows(tmp_path) == [
        ("4711", "out-4711-0.log", 0, "out"),
        ("4711", "out-4711-1.log", 1, "out"),
        ("4711", "slurm-4711.out", None, "out"),
    ]


def test_submitits_files_have_their_task_numbers_also_in_an_array(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(
        make_part(
            tmp_path,
            job={"job_id": "4720"},
            label="4711_2",
            array_task_id="2",
            stdout=str(tmp_path / "s/4711_2_0_log.out"),
            stderr=str(tmp_path / "s/4711_2_0_log.err"),
        )
    )
    touch(tmp_path, "s/4711_2_0_log.out", "s/4711_2_0_log.err", "s/4711_2_1_log.out")
    touch(tmp_path, "s/4711_3_0_log.out", "s/4711_2_submission.sh", "s/4711_2_0_result.pkl")
    assert rows(tmp_path) == [
        ("4711_2", "s/4711_2_0_log.err", 0, "err"),
        ("4711_2", "s/4711_2_0_log.out", 0, "out"),
        ("4711_2", "s/4711_2_1_log.out", 1, "out"),
    ]


def test_torchruns_newest_attempt_of_this_job_is_one_source_per_rank(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path))
    for run in ("logs/4711_ab12", "logs/4710_ab12", "other/4711_ab12"):
        touch(tmp_path / run, "attempt_0/0/stdout.log", "attempt_10/0/stdout.log")
        touch(tmp_path / run, "attempt_10/1/stderr.log", "attempt_9/0/stdout.log")
    assert rows(tmp_path) == [
        ("4711", "logs/4711_ab12/attempt_10/0/stdout.log", 0, "out"),
        ("4711", "logs/4711_ab12/attempt_10/1/stderr.log", 1, "err"),
    ]


def test_torchruns_of_several_nodes_do_not_claim_each_others_ranks(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path))
    touch(tmp_path, "torch/4711/a/attempt_0/0/stdout.log", "torch/4711/b/attempt_0/0/stdout.log")
    assert rows(tmp_path) == [
        ("a/0", "torch/4711/a/attempt_0/0/stdout.log", None, "out"),
        ("b/0", "torch/4711/b/attempt_0/0/stdout.log", None, "out"),
    ]


def test_files_that_share_a_label_are_named_apart(tmp_path: Path) -> None:
    def names(*files: tuple[str, str]) -> list[str]:
        return name_files(ForeignFile(label=label, path=tmp_path / path) for label, path in files)

    alone = ("4711", "slurm-4711.out")
    assert names(alone) == ["4711"]
    assert names(alone, ("4711", "slurm-4711.err")) == ["slurm-4711.out", "slurm-4711.err"]
    ranks = [("4711", f"tr/attempt_0/{rank}/stdout.log") for rank in (0, 1)]
    assert names(alone, *ranks) == ["slurm-4711.out", "0/stdout.log", "1/stdout.log"]
    assert names(("x.out", "a/x.out"), ("x.out", "b/x.out")) == ["a/x.out", "b/x.out"]


def test_an_output_without_the_jobs_number_is_not_an_earlier_jobs(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path, stdout=str(tmp_path / "train.log")))
    touch(tmp_path, "train.log")
    assert rows(tmp_path) == [("4711", "train.log", None, "out")]
    os.utime(tmp_path / "train.log", (999_999_000, 999_999_000))
    assert rows(tmp_path) == []
    known[0] = make_part(tmp_path, stdout=str(tmp_path / "train.log"), job={"start": None})
    assert rows(tmp_path) == []


def test_files_of_a_waiting_job_are_expected_not_invented(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(tmp_path, stdout="%x-%j-%t.out", job={"state": JobState.PENDING}))
    job = find_foreign("4711", tmp_path)
    assert job is not None
    assert (job.files, job.state) == ((), JobState.PENDING)
    assert job.expected == (str(tmp_path / "gpt-4711-%t.out"),)
    touch(tmp_path, "gpt-4711-0.out")
    assert [file.path.name for file in look_again(job).files] == ["gpt-4711-0.out"]


def test_a_device_is_no_log(tmp_path: Path, known: list[ForeignPart]) -> None:
    known.append(make_part(tmp_path, stdout="/dev/null"))
    assert rows(tmp_path) == []


def test_a_job_of_ours_from_elsewhere_says_which_run_it_is(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    paths = RunPaths(root=tmp_path / "runs" / "gpt" / "r1")
    touch(paths.root, "job.json", "slurm/batch.out")
    known.append(make_part(tmp_path, stdout=str(paths.batch_output)))
    job = find_foreign("4711", tmp_path)
    assert job is not None
    assert job.run_dir == paths.root


def test_files_that_cannot_be_looked_at_are_told_in_the_systems_words(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    (tmp_path / "locked").symlink_to("locked")  # root may enter any directory, but no loop
    known.append(make_part(tmp_path, stdout=str(tmp_path / "locked" / "4711.out")))
    with pytest.raises(ClusterrunError) as failed:
        find_foreign("4711", tmp_path)
    assert failed.value.cause == "Too many levels of symbolic links"


# Nobody knows the job


def test_without_memory_of_the_job_its_number_in_a_name_is_enough(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    touch(tmp_path, "slurm-4711.out", "x-4711_3.err", "slurm-14711.out", "4711.pt")
    assert rows(tmp_path) == [
        ("slurm-4711.out", "slurm-4711.out", None, "out"),
        ("x-4711_3.err", "x-4711_3.err", None, "err"),
    ]
    assert rows(tmp_path, "4711_3") == [("x-4711_3.err", "x-4711_3.err", None, "err")]
    assert find_foreign("4712", tmp_path) is None


def test_an_array_that_nobody_knows_has_tasks_that_are_no_ranks(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    touch(tmp_path, "slurm-4711_0.out", "slurm-4711_1.out", "t-4711-0.log", "t-4711-1.log")
    touch(tmp_path, "4711_0_log.out")
    assert [(label, rank) for label, _, rank, _ in rows(tmp_path)] == [
        ("4711", 0),
        ("slurm-4711_0.out", None),
        ("slurm-4711_1.out", None),
        ("4711", 0),
        ("4711", 1),
    ]


def test_where_accounting_does_not_say_the_directory_it_is_the_callers(
    tmp_path: Path, known: list[ForeignPart]
) -> None:
    known.append(make_part(Path(""), stdout="slurm-%j.out"))
    touch(tmp_path, "slurm-4711.out")
    assert rows(tmp_path) == [("4711", "slurm-4711.out", None, "out")]


def test_a_silent_slurm_is_no_obstacle_where_a_file_carries_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(job_id: str) -> list[ForeignPart]:
        raise SchedulerUnreachableError("scontrol got no answer", cause="connect failure")

    monkeypatch.setattr(slurm, "ask", ask)
    touch(tmp_path, "slurm-4711.out")
    job = find_foreign("4711", tmp_path)
    assert job is not None
    assert (job.state, job.problem) == (None, "connect failure")
    with pytest.raises(SchedulerUnreachableError):
        find_foreign("4712", tmp_path)


# A file by its path


def test_a_file_by_its_path_is_one_source_and_slurm_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "ask", lambda job_id: pytest.fail("asked"))
    touch(tmp_path, "a b/train.err")
    job = find_foreign("a b/train.err", tmp_path)
    assert job is not None
    assert (job.job_id, job.state, job.run_dir) == ("", None, None)
    assert ask_state(job) is JobState.UNKNOWN
    assert rows(tmp_path, "a b/train.err") == [("train.err", "a b/train.err", None, "err")]
    assert find_foreign("a b", tmp_path) is None
    assert find_foreign("nothing", tmp_path) is None


def test_a_stamped_log_by_its_path_says_which_run_it_is_of(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "runs" / "gpt" / "r1")
    touch(paths.root, "job.json", "logs/a2/node07.log")
    job = find_foreign("runs/gpt/r1/logs/a2/node07.log", tmp_path)
    assert job is not None
    assert job.run_dir == paths.root
    assert [file.label for file in job.files] == ["node07"]


def test_a_path_that_cannot_be_looked_at_is_told_in_the_systems_words(tmp_path: Path) -> None:
    with pytest.raises(ClusterrunError) as failed:
        find_foreign("x" * 300, tmp_path)
    assert "File name too long" in (failed.value.cause or "")


# Patterns and names

SYMBOLS = {"j": "128", "A": "120", "a": "3", "u": "me", "x": "gpt", "r": "1"}


@pytest.mark.parametrize(
    ("pattern", "name", "task"),
    [
        ("job%J.out", "job128.0.out", None),
        ("job%4j.out", "job0128.out", None),
        ("job%j-%2t.out", "job128-07.out", 7),
        ("%t/%A_%a-%t", "3/120_3-3", 3),
        ("%x-%u-%r-%s%%.o", "gpt-me-1-batch%.o", None),
        ("%99j", "0000000128", None),
        ("%q-%j-%", "%q-128-%", None),
        ("\\%j-%t.out", "%j-%t.out", None),
        ("[ab]*?-%t", "[ab]*?-5", 5),
    ],
)
def test_a_pattern_finds_what_slurm_makes_of_it(
    tmp_path: Path, pattern: str, name: str, task: int | None
) -> None:
    touch(tmp_path, name, "unrelated", "job128x-07.out", "a-5")
    found = find_pattern_files(pattern, SYMBOLS, tmp_path)
    assert [(str(f.path.relative_to(tmp_path)), f.task) for f in found] == [(name, task)]


NAMES = st.text(st.characters(exclude_characters="\0/%\\", codec="utf-8"), min_size=1, max_size=40)


@given(name=NAMES.filter(lambda name: name not in (".", "..")))
def test_text_without_symbols_names_itself_and_never_acts_as_a_glob(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    directory = tmp_path_factory.mktemp("[x]*")
    (directory / "decoy").touch()
    (directory / name).touch()
    found = find_pattern_files(name, SYMBOLS, directory)
    assert [file.path.name for file in found] == [name]


@pytest.mark.parametrize(
    ("names", "restarts"),
    [
        (["a-4711-0.log", "a-4711-2.log"], 0),  # a gap
        (["a-4711-1.log", "a-4711-2.log"], 0),  # not from 0
        (["a-4711-n0.log", "a-4711-n1.log"], 0),  # nodes
        (["a-4711-0.log", "a-4711-1.log"], 1),  # a job's restarts
        (["a-4711-0-7.log", "a-4711-1-8.log"], 0),  # two numbers differ
    ],
)
def test_no_task_number_is_read_from_names_that_do_not_tell_it(
    names: list[str], restarts: int
) -> None:
    paths = [Path(name) for name in names]
    assert [task for _, task in read_tasks(paths, restarts=restarts)] == [None, None]
