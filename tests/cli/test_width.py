"""What is printed fits a terminal of any width; elsewhere it does not depend on one."""

from __future__ import annotations

import pytest

from clusterrun.cli.shared.fitting import cells, fitted, wrapped
from clusterrun.rundir.outcome import Cause
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, queue, running, submitted
from tests.terminals import columns_of, shown_in

WIDE = "訓練 failed: \x1b[2J/a/path/that/is/longer/than/any/of/the/terminals/" + "x" * 90
PLAN = ("plan", "--model", "llama-3.1-8b", "--seq-len", "4096", "--gpu", "h100-80g", "-N", "4")


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def failed(here: CommandLine, name: str = "train-訓練") -> None:
    root = submitted(here, "4698", "-N2", "-J", name, "--gpus-per-node", "4", "train.py")
    outcome(root, cause=Cause.EXCEPTION, rank=1, node="node17", code=1, message=WIDE, reason=WIDE)
    ended(root, "FAILED", 1)


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_no_line_is_longer_than_the_terminal(here: CommandLine, columns: int) -> None:
    failed(here)
    submitted(here)
    queue(here, running())
    gpus = ("--gpus-per-node", "8", "--strategy", "zero3")
    for words in (
        *(("list",), ("status", "4698"), ("diagnose", "4698"), ("status", "4711")),
        *((*PLAN, *gpus), ("doctor", "--only", "node,slurm,path"), ("status", "nosuch")),
    ):
        lines = shown_in(columns, *words)
        long = [line.split() for line in lines if columns_of(line) > columns]
        assert lines
        assert [words for words in long if words[0] != "clusterrun"] == []  # these are to copy


def test_list_has_one_line_for_each_job_at_80_columns(here: CommandLine) -> None:
    failed(here, "a-name-that-is-longer-than-any-column-would-be")
    submitted(here)
    queue(here, "4711|PENDING||0:00|UNLIMITED|N/A|N/A|Priority")
    head, *rows = shown_in(80, "list")
    assert head.split() == ["JOB", "NAME", "STATE", "NODES", "STEP", "WHY", "/", "WHERE"]
    assert [row.split()[0] for row in rows] == ["4711", "4698"]
    assert "jobs with higher" in rows[0]
    assert rows[1].endswith("…")
    assert "START" in shown_in(200, "list")[0]


def test_the_verdict_of_plan_is_the_last_line_of_a_terminal(here: CommandLine) -> None:
    words = (*PLAN, "--gpus-per-node", "8", "--strategy", "zero3")
    first, *_, last = shown_in(80, *words)
    assert first == last
    assert here(*words).out.count(first) == 1


def test_doctor_ends_with_what_is_wrong_on_a_terminal(here: CommandLine) -> None:
    here.program("sbatch", "exit 1")
    words = ("doctor", "--only", "slurm,python")
    lines = shown_in(80, *words)
    said = here(*words)
    wrong = [line.split()[1] for line in said.out.splitlines() if line.startswith("FAIL")]
    count = next(line for line in lines if " skipped" in line)
    after = [line.split()[1] for line in lines[: lines.index(count)] if line.startswith("FAIL")]
    assert wrong == after != []
    assert not any(line.startswith("skip") for line in lines)
    assert any(line.startswith("skip") for line in shown_in(80, *words, "-v"))
    oks = [n for n, line in enumerate(lines) if line.startswith("ok")]
    assert max(oks, default=0) < min(n for n, line in enumerate(lines) if line.startswith("FAIL"))


@pytest.mark.parametrize(
    ("line", "width", "indent", "expected"),
    [
        ("label      one two three", 20, None, ["label      one two", "      three"]),
        ("one two three", 9, 0, ["one two", "three"]),
        ("ab" * 6, 8, 2, ["abababab", "  abab"]),
        ("訓練" * 3, 8, 1, ["訓練訓練", " 訓練"]),
        ("\x1b[31mred words\x1b[0m end", 9, 0, ["\x1b[31mred words\x1b[0m", "end"]),
        ("", 9, None, [""]),
    ],
)
def test_a_long_line_is_wrapped_below_its_text(
    line: str, width: int, indent: int | None, expected: list[str]
) -> None:
    assert list(wrapped(line, width, indent)) == expected
    assert all(cells(each) <= width for each in expected)


def test_columns_that_can_be_spared_go_first(here: CommandLine) -> None:
    table = [("JOB", "START", "WHY"), ("4711", "2026-01-01 10:00", "a long reason for it all")]
    assert fitted(table, 80, ["START"]) == table
    assert fitted(table, 30, ["START"]) == [("JOB", "WHY"), ("4711", "a long reason for it all")]
    assert fitted(table, 18, ["START"])[1] == ("4711", "a long reas…")
