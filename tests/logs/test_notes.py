"""What the last lines hold, and what is said beside them of those that are left out."""

from __future__ import annotations

import pytest

from clusterrun.rundir.outcome import Cause
from tests.cli.outcomes import outcome
from tests.logs.corpus import T0, raw
from tests.logs.runs import SECOND, LogsCommand


def write_errors(run: LogsCommand, node: str, *errors: tuple[int, int, str]) -> None:
    """Write errors (time, rank, text) to a node's log."""
    run.write(node, *(raw(time_us, rank, "e", text) for time_us, rank, text in errors))


@pytest.fixture
def long_ago(here: LogsCommand) -> LogsCommand:
    """Give a run where an error of another rank was followed by much of rank 0."""
    here.start()
    write_errors(here, "n2", (T0, 9, "ValueError: the cause"))
    here.write("n1", *(raw(T0 + SECOND + i, 0, "o", f"step {i}") for i in range(300)))
    write_errors(here, "n1", (T0 + 9 * SECOND, 1, "OSError: lost"))
    here.end("FAILED", 1)
    return here


def note_of(run: LogsCommand, *args: str) -> str:
    done = run.logs("L1", *args)
    assert done.returncode == 0
    return done.stderr


@pytest.mark.parametrize("form", [[], ["--no-dedup"], ["-o", "raw"]])
def test_an_old_error_line_of_another_rank_is_among_the_last_lines(
    long_ago: LogsCommand, form: list[str]
) -> None:
    lines = long_ago.lines("L1", "--prefix", "none", *form)
    assert len(lines) == 200
    assert lines[:2] == ["ValueError: the cause", "step 102"]
    assert lines[-1] == "OSError: lost"


def test_error_lines_take_no_more_than_half_of_the_room(here: LogsCommand) -> None:
    here.start()
    write_errors(here, "n2", *((T0 + i, 9, f"ValueError: {'x' * i}") for i in range(20)))
    here.write("n1", *(raw(T0 + SECOND + i, 0, "o", f"step {i}") for i in range(20)))
    write_errors(here, "n1", (T0 + 9 * SECOND, 0, "OSError: lost"))
    done = here.logs("L1", "-n", "10", "--prefix", "none")
    assert done.stdout.splitlines() == [
        *(f"ValueError: {'x' * i}" for i in range(16, 20)),
        *(f"step {i}" for i in range(15, 20)),
        "OSError: lost",
    ]
    assert done.stderr.startswith(
        "note: last 10 lines of rank 0 and the launcher, and the newest error lines of all 16 ranks"
    )


SAID = (
    ([], "note: last 200 lines of rank 0 and the launcher, and the error lines of all 16 ranks; "
         "8,968 bytes in all"),
    (["-n", "all"], "note: all lines of rank 0 and the launcher, and the error lines of all 16"),
    (["-g", "step"], "note: last 200 lines of rank 0 and the launcher, and"),
    (["-a", "-n", "2"], "note: last 2 lines (-n all, -f follow)"),
    (["--errors", "--rank", "3"], "note: no line matches; 8,968 bytes in all"),
    (["-g", "nothing"],
     "note: no line of rank 0, the launcher or the errors matches; 8,968 bytes in all"),
)  # fmt: skip
SILENT = (["-a", "-n", "all"], ["-a", "-g", "step 1.$"], ["--errors"], ["--rank", "7", "-n", "0"])


def test_what_is_left_out_is_said_and_nothing_else(long_ago: LogsCommand) -> None:
    wrong = [args for args, note in SAID if not note_of(long_ago, *args).startswith(note)]
    assert wrong + [args for args in SILENT if note_of(long_ago, *args)] == []


def test_the_last_lines_of_each_attempt_are_said_to_be_so(long_ago: LogsCommand) -> None:
    long_ago.write("n1", raw(T0 + 99 * SECOND, 0, "o", "again"), attempt=2)
    said = note_of(long_ago, "--attempt", "all", "-n", "1").splitlines()
    assert said[-1].startswith("note: last 1 line of each attempt of rank 0 and the launcher")
    said = note_of(long_ago, "--attempt", "all", "--rank", "0", "-n", "1").splitlines()
    assert said[-1] == "note: last 1 line of each attempt (-n all, -f follow)"


def test_the_silent_failure_of_each_attempt_comes_first(long_ago: LogsCommand) -> None:
    long_ago.write("n1", raw(T0 + 99 * SECOND, 0, "o", "again"), attempt=3)
    root = long_ago.paths.root
    outcome(root, 1, message="killed by SIGKILL", rank=1, node="n1", signal=9)
    outcome(root, 2, cause=Cause.EXCEPTION)
    outcome(root, 3, cause=Cause.COMPLETED, code=0)
    said = note_of(long_ago, "--errors", "--attempt", "all").splitlines()
    assert said[0].startswith("note: first failure of attempt 1: rank 1 on n1: ")
    assert [line for line in said if "first failure" in line] == said[:1]


def test_each_attempt_has_all_the_room(long_ago: LogsCommand) -> None:
    long_ago.write("n1", *(raw(T0 + i, 0, "o", f"again {i}") for i in range(9)), attempt=2)
    lines = long_ago.lines("L1", "--attempt", "all", "-n", "4", "--prefix", "auto")
    assert [line.partition(" ")[2].strip(" |!") for line in lines] == [
        "ValueError: the cause", "step 298", "step 299", "OSError: lost",
        "again 5", "again 6", "again 7", "again 8",
    ]  # fmt: skip
