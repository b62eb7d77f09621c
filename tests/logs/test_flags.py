"""Every option of `clusterrun logs`, typed as a user types it, on a run as the nodes leave it."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.cli.logs_view import parse_moment
from clusterrun.errors import UsageError
from clusterrun.rundir.end import Cause
from tests.cli.outcomes import outcome
from tests.logs.corpus import T0, raw
from tests.logs.runs import SECOND, LogsCommand


def shown(run: LogsCommand, *args: str) -> list[str]:
    return run.lines("L1", "--prefix", "none", *args)


CHOICES = (
    (["--rank", "::8", "-n", "2"], ["step 2 loss 2.25", "eight"]),
    (["--rank", "9-15"], ["about to fail", "ValueError: bad", "after"]),
    (["--stream", "err"], ["UserWarning: slow", "ValueError: bad"]),
    (["--stream", "agent,launcher"], ["8 ranks start", "launcher says"]),
    (["--stream", "out", "--rank", "9"], ["about to fail", "after"]),
    (["-a", "-g", "loss"], ["step 1 loss 2.5", "step 2 loss 2.25"]),
    (["-a", "-i", "^three$", "--include", "e..ht"], ["three", "eight"]),
    (["-a", "--exclude", "loss|rank|says", "--exclude", "e$"],
     ["UserWarning: slow", "about to fail", "ValueError: bad", "eight", "after"]),
    (["-a", "-g", "step", "--exclude", "2.25"], ["step 1 loss 2.5"]),
    (["--errors"], ["ValueError: bad"]),
    (["--errors", "--rank", "0"], []),
    (["-a", "-n", "2", "--exclude", "says"], ["eight", "after"]),
    (["--attempt", "all", "--rank", "3"], ["three"]),
)  # fmt: skip


def test_choices(run: LogsCommand) -> None:
    wrong = [(args, got) for args, lines in CHOICES if (got := shown(run, *args)) != lines]
    assert wrong == []


def test_since_and_until_take_times(run: LogsCommand) -> None:
    run.environ["TZ"] = "UTC"
    at = [datetime.fromtimestamp(T0 // SECOND + s, timezone.utc) for s in range(8)]
    iso = [moment.strftime("%Y-%m-%dT%H:%M:%S") for moment in at]
    assert shown(run, "-a", "--since", iso[5], "--until", iso[6]) == [
        "ValueError: bad", "eight", "after",
    ]  # fmt: skip
    assert shown(run, "--since", f"{iso[3]}Z", "--until", f"{iso[4]}Z") == ["step 2 loss 2.25"]
    assert shown(run, "-t", "--rank", "3") == ["22:13:21.000 three"]


def test_equal_lines_of_many_ranks_are_one_unless_all_are_wanted(here: LogsCommand) -> None:
    here.start()
    here.write("n1", *(raw(T0 + r, r, "o", "loading data") for r in range(8)))
    here.write("n2", *(raw(T0 + r, r, "o", "loading data") for r in range(8, 16)))
    assert here.lines("L1", "-a") == ["[16 ranks] | loading data"]
    assert len(here.lines("L1", "-a", "--no-dedup")) == 16
    assert len(here.lines("L1", "-a", "--json")) == 16


def test_attempts_can_be_counted_from_the_end(run: LogsCommand) -> None:
    run.write("n1", raw(T0 + 9 * SECOND, 0, "o", "again"), attempt=2)
    assert shown(run) == ["again"]
    assert shown(run, "--attempt", "-1", "--rank", "3") == ["three"]
    done = run.logs("L1", "--attempt", "all", "--stream", "out", "--rank", "0")
    assert [line.split(" | ")[1] for line in done.stdout.splitlines()] == [
        "step 1 loss 2.5", "step 2 loss 2.25", "again",
    ]  # fmt: skip
    assert "== attempt 2 ==" in done.stderr
    assert shown(run, "--attempt", "all", "-n", "1", "--rank", "0") == ["step 2 loss 2.25", "again"]


def test_what_a_side_file_left_out_is_told(run: LogsCommand) -> None:
    with run.paths.log_errors(1, "n2").open("ab") as side:
        side.write(raw(T0 + 6 * SECOND, None, "g", "- 99 x 1 full"))
    for args in ((), ("--errors", "-n", "1")):
        said = run.logs("L1", *args)
        assert said.stderr.splitlines()[-1] == (
            "note: some error lines of n2 are only in the log: print it with "
            "-a -n all -g '(?i)error|warn|traceback', without --errors"
        )
        assert said.stdout


MISTAKES = (
    (["-g", "("], "bad --include pattern: missing ), unterminated subpattern at position 0"),
    (["--exclude", "*"], "bad --exclude pattern: nothing to repeat at position 0"),
    (["--since", "soon"], "--since: 'soon' is not a time"),
    (["--until", "25:00"], "--until: '25:00' is not a time"),
    (["--since", "1h", "--until", "2h"], "--since is not before --until"),
    (["--stream", "stdin"], "no stream 'stdin'"),
    (["--stream", "batch", "--errors"], "--errors and --stream batch cannot be combined"),
    (["--stream", "batch,out"], "no stream 'batch' to merge"),
    (["--attempt", "-1"], "job L1 has no attempt -1"),
    (["--rank", "9000"], "rank 9000 does not exist; job L1 has ranks 0-15"),
    (["--follow", "--until", "1h"], "--follow and --until cannot be combined"),
    (["--node", "n7"], "no log from n7\n  hint: choose from n[1-2]\n"),
    (["--rank", "16"], "rank 16 does not exist; job L1 has ranks 0-15\n"),
    (["--rank", "x"], "'x' is not a rank\n"),
    (["--rank", ""], "'' is not a rank\n"),
    (["--rank", "0", "-a"], "--rank and --all-ranks cannot be combined\n"),
    (["--node", "n[1-"], "bad host list 'n[1-': '[' is unmatched at position 2\n"),
    (["-n", "-3"], "'-3' is not a number of lines\n"),
    (["--attempt", "0"], "'0' is not an attempt"),
    (["-o", "xml"], "invalid value for '-o' / '--output': 'xml' is not one of"),
)


def test_mistakes_are_told_in_a_line_with_a_way_out(run: LogsCommand) -> None:
    for args, message in MISTAKES:
        done = run.logs("L1", *args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert done.stderr.startswith(f"error: {message}"), args


def test_the_last_lines_are_counted_as_they_are_shown(here: LogsCommand) -> None:
    here.start()
    here.write("n2", raw(T0, 9, "e", "MemoryError: the cause"))
    here.write("n1", *(raw(T0 + 1 + r, r, "e", f"OSError: lost by rank {r}") for r in range(8)))
    expected = ["n2:9      ! MemoryError: the cause", "[8 ranks] ! OSError: lost by rank <n>"]
    for args in (["-n", "2"], ["--errors", "-n", "2"], ["-a", "-n", "2"]):
        assert [re.sub(" +[!]", " !", line) for line in here.lines("L1", *args)] == [
            re.sub(" +[!]", " !", line) for line in expected
        ]
    assert len(here.lines("L1", "-n", "1")) == 1
    assert len(here.lines("L1", "-n", "2", "--no-dedup")) == 2


def test_a_name_that_no_file_can_have_is_no_crash(run: LogsCommand) -> None:
    run.environ["PATH"] = str(run.path)
    done = run.logs("x" * 5000)
    assert done.returncode == 4
    assert done.stderr.startswith("error: no job or run 'xxx")


def test_nothing_of_a_log_moves_the_readers_terminal(run: LogsCommand) -> None:
    evil = b"1 \x1b]0;title\x07\x1b[2Jbad news"
    run.write("n2", raw(T0 + 9 * SECOND, None, "z", evil))
    done = run.logs("L1", "-f", "--color", "always", "-n", "all", "--rank", "9")
    assert "- n2 exited 1" in done.stderr
    assert "\x1b]" not in done.stderr
    assert "\x1b[2J" not in done.stderr


def test_a_batch_script_that_printed_nothing_is_no_failure(run: LogsCommand) -> None:
    run.paths.slurm_dir.mkdir()
    run.paths.batch_output.write_text("")
    done = run.logs("L1", "--stream", "batch")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "the batch script of job L1 has printed nothing\n"


def test_a_finished_progress_bar_has_the_time_of_its_end(run: LogsCommand) -> None:
    run.environ["TZ"] = "UTC"
    at = [T0 + (20 + i) * SECOND for i in range(4)]
    run.write("n2", raw(at[0], 9, "E", "10%\r"), raw(at[1], 9, "E", "50%\r"))
    run.write("n2", raw(at[2], 9, "o", "meanwhile"), raw(at[3], 9, "e", "100%\r"))
    assert shown(run, "--rank", "9", "-n", "2", "-t") == [
        "22:13:42.000 meanwhile",
        "22:13:43.000 100%",
    ]


def test_the_batch_scripts_output_carries_no_times(run: LogsCommand) -> None:
    run.paths.slurm_dir.mkdir()
    run.paths.batch_output.write_text("one\ntwo\n")
    done = run.logs("L1", "--stream", "batch", "-t")
    assert (done.stdout, done.stderr) == (
        "batch    | one\nbatch    | two\n",
        "note: the output of the batch script has no times\n",
    )
    entries = [json.loads(line) for line in run.lines("L1", "--stream", "batch", "--json")]
    assert [(entry["ts"], entry["text"]) for entry in entries] == [(None, "one"), (None, "two")]
    done = run.logs("L1", "--stream", "batch", "--since", "1h")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --since: the output of the batch script of job L1 has no times\n"
        "  hint: leave out --since\n",
    )


ZONE = timezone(timedelta(hours=2))
NOW = datetime(2026, 8, 1, 12, 0, 30, tzinfo=ZONE)


MOMENTS = {
    "10m": "2026-08-01T11:50:30+02:00",
    "2d": "2026-07-30T12:00:30+02:00",
    "11:59": "2026-08-01T11:59:00+02:00",
    "9:05:07.250": "2026-08-01T09:05:07.250000+02:00",
    "12:01": "2026-07-31T12:01:00+02:00",
    "2026-07-01": "2026-07-01T00:00:00+02:00",
    "2026-07-01 12:30:15": "2026-07-01T12:30:15+02:00",
    "2026-07-01T12:41:15.204113Z": "2026-07-01T14:41:15.204113+02:00",
    "2026-07-01T10:30+05:30": "2026-07-01T07:00:00+02:00",
}
NO_MOMENTS = st.sampled_from(["", "10", "25:00", "12:60", "2026-13-01", "-5m", "5w"])


def test_forms_of_a_moment() -> None:
    epoch = datetime.fromtimestamp(0, ZONE)
    found = {text: epoch + timedelta(microseconds=parse_moment(text, NOW)) for text in MOMENTS}
    assert found == {text: datetime.fromisoformat(meant) for text, meant in MOMENTS.items()}


@given(NO_MOMENTS | st.text(max_size=30))
def test_any_text_is_a_moment_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_moment(text, NOW)
        assert text not in ("", "10", "25:00", "12:60", "2026-13-01", "-5m", "5w")


# What the last lines hold, and the note on those that are left out


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
    assert len(lines) == 201
    assert lines[:2] == ["ValueError: the cause", "step 101"]
    assert lines[-1] == "OSError: lost"


def test_before_the_last_lines_are_half_as_many_error_lines(here: LogsCommand) -> None:
    here.start()
    write_errors(here, "n2", *((T0 + i, 9, f"ValueError: {'x' * i}") for i in range(20)))
    here.write("n1", *(raw(T0 + SECOND + i, 0, "o", f"step {i}") for i in range(20)))
    write_errors(here, "n1", (T0 + 9 * SECOND, 0, "OSError: lost"))
    done = here.logs("L1", "-n", "10", "--prefix", "none")
    assert done.stdout.splitlines() == [
        *(f"ValueError: {'x' * i}" for i in range(16, 20)),
        *(f"step {i}" for i in range(11, 20)),
        "OSError: lost",
    ]
    assert done.stderr.startswith(
        "note: last 14 lines of rank 0 and the launcher, and the newest error lines of all 16 ranks"
    )


SAID = (
    ([], "note: last 201 lines of rank 0 and the launcher, and the newest error lines of all 16 "
         "ranks; 8,968 bytes in all"),
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
        "ValueError: the cause", "step 297", "step 298", "step 299", "OSError: lost",
        "again 5", "again 6", "again 7", "again 8",
    ]  # fmt: skip
