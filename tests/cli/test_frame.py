"""The frame of the command line, run as a user runs it: a process with streams and a status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun import __version__
from clusterrun.cli.main import VERBS, main
from clusterrun.cli.shared.output import cells, fitted, wrapped
from clusterrun.rundir.end import Cause
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import outcome
from tests.cli.runs import ended, queue, running, submitted
from tests.patience import finished
from tests.terminals import columns_of, in_terminal, shown_in


def clusterrun(
    *args: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TERM": "xterm", **environ}
    return finished([sys.executable, "-m", "clusterrun", *args], cwd=cwd, env=env)


def test_help_and_every_verb_have_the_summaries_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = clusterrun("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for name, verb in VERBS.items():
        assert f"  {name:<10}  {verb.summary}\n" in result.stdout
        assert main([name, "--help"]) == 0
        usage, summary = capsys.readouterr().out.split("\n\n")[:2]
        assert usage.startswith(f"Usage: clusterrun {name} ")
        assert " ".join(summary.split()) == verb.summary


def test_what_needs_no_verb() -> None:
    result = clusterrun("--version")
    assert (result.returncode, result.stdout) == (0, f"clusterrun {__version__}\n")
    result = clusterrun()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: clusterrun ")
    for words in (("help",), ("help", "submit")):
        assert clusterrun(*words).stdout == clusterrun(*words[1:], "--help").stdout
    result = clusterrun("help", "exit-codes")
    assert result.returncode == 0
    told = [line.split()[0] for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert told[:8] == ["0", "1", "2", "3", "4", "5", "130", "141"]


def test_a_reader_that_goes_away_or_a_full_disk_is_told_in_one_line() -> None:
    argv = [sys.executable, "-m", "clusterrun", "help", "exit-codes"]
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    for stdout, status, said in (
        (writing, 141, b""),
        (full, 1, b"error: cannot write to stdout: [Errno 28] No space left on device\n"),
    ):
        result = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, check=False)
        assert (result.returncode, result.stderr) == (status, said)
        os.close(stdout)


def _shown(*args: str, **environ: str) -> str:
    """Run in a terminal, and return what was shown there."""
    env = {name: text for name, text in os.environ.items() if "COLOR" not in name}
    argv = [sys.executable, "-m", "clusterrun", *args]
    return in_terminal(argv, stdout=subprocess.DEVNULL, env=env | {"TERM": "xterm"} | environ)[1]


RED = "\x1b[31m"


@pytest.mark.parametrize(
    ("args", "environ", "coloured"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        ((), {"NO_COLOR": ""}, True),
        ((), {"TERM": "dumb"}, False),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
    ],
)
def test_colour_on_a_terminal(
    args: tuple[str, ...], environ: dict[str, str], coloured: bool
) -> None:
    assert (RED in _shown(*args, "nosuch", **environ)) is coloured


def test_colour_in_a_pipe() -> None:
    for args, environ, coloured in (
        ((), {}, False),
        ((), {"FORCE_COLOR": "0"}, False),
        ((), {"CLICOLOR_FORCE": "1"}, True),
        ((), {"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False),
        (("submit", "--color", "always"), {}, True),
    ):
        assert (RED in clusterrun(*args, "--nosuch", **environ).stderr) is coloured


def test_error_object_when_json_was_asked_for() -> None:
    result = clusterrun("status", "--json", "--nosuch")
    assert result.returncode == 2
    assert json.loads(result.stdout) == {
        "schema": "clusterrun.error/1",
        "code": "usage",
        "message": "no option '--nosuch'",
        "where": None,
        "cause": None,
        "hint": "run 'clusterrun status --help' for the options",
        "exit_code": 2,
    }
    assert result.stderr.startswith("error: no option '--nosuch'\n")


def test_crash_leaves_its_traceback_in_a_private_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys, clusterrun.cli.shared.output as output\n"
        "def answer(*_): raise RuntimeError('boom')\n"
        "output.answer = answer\n"
        "from clusterrun.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, str(broken), "help", "exit-codes"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = finished(argv, env=env)
    (crash,) = (tmp_path / "cache" / "clusterrun").iterdir()
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: clusterrun itself failed: RuntimeError: boom\n"
        f"  hint: report it with the traceback in {crash}\n"
    )
    assert crash.stat().st_mode & 0o777 == 0o600
    assert "RuntimeError: boom" in crash.read_text()


@pytest.mark.parametrize("module", ["clusterrun.cli.main", "click", "clusterrun.verbs.status"])
def test_ctrl_c_during_an_import_prints_no_traceback(tmp_path: Path, module: str) -> None:
    is_it = f"event == 'import' and args[0] == {module!r}"
    hook = f"lambda event, args: {is_it} and os.kill(os.getpid(), 2)"
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nsys.addaudithook({hook})\n")
    done = clusterrun("list", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
    setup = Path(__file__).parents[2] / "setup.cfg"
    assert "    clusterrun = clusterrun.__main__:main\n" in setup.read_text()


# What is printed fits a terminal of any width; elsewhere it does not depend on one


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
    queue(here, "4711|PENDING||0:00|UNLIMITED|N/A|N/A|||Priority")
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


def test_a_recommendation_is_whole_at_80_columns(here: CommandLine) -> None:
    words = (*PLAN, "--gpus-per-node", "8", "--recommend", "--effective-batch", "256")
    lines = shown_in(80, *words)
    assert not any("…" in line for line in lines)
    (head,) = [line.split("  ") for line in lines if line.startswith("STRATEGY")]
    names = ["STRATEGY", "MICRO-BATCH", "ACCUMULATION", "GRAD-CKPT", "GPU GiB", "TIME", "VERDICT"]
    assert [name.strip() for name in head if name.strip()] == names
    (command,) = [x for x in here(*words).out.splitlines() if x.startswith("details: ")]
    assert command in lines


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
