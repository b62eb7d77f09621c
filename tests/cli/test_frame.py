"""The frame of the command line, run as a user runs it: a process with streams and a status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.cli.main import VERBS, main
from tests.patience import patience


def clusterrun(
    *args: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterrun", *args],
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        check=False,
    )


def test_help_lists_every_verb_with_its_summary() -> None:
    result = clusterrun("--help")
    assert result.returncode == 0
    assert result.stderr == ""
    for name, verb in VERBS.items():
        assert f"  {name:<10}  {verb.summary}\n" in result.stdout


def test_every_verb_explains_itself_with_the_summary_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, verb in VERBS.items():
        assert main([name, "--help"]) == 0
        usage, summary = capsys.readouterr().out.split("\n\n")[:2]
        assert usage.startswith(f"Usage: clusterrun {name} ")
        assert " ".join(summary.split()) == verb.summary


def test_what_needs_no_verb() -> None:
    result = clusterrun("--version")
    assert (result.returncode, result.stdout) == (0, "clusterrun 0.1.0\n")
    result = clusterrun()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: clusterrun ")
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


def _in_terminal(*args: str, **environ: str) -> str:
    """Run with stderr on a pseudo-terminal and return what was shown there."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", **environ}
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        if name not in environ:
            env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterrun", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env=env,
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other end was closed
        pass
    process.wait(timeout=60 * patience())
    os.close(master)
    return shown.decode()


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
    assert (RED in _in_terminal(*args, "nosuch", **environ)) is coloured


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
    result = subprocess.run(
        argv, capture_output=True, text=True, env=env, timeout=60 * patience(), check=False
    )
    (crash,) = (tmp_path / "cache" / "clusterrun").iterdir()
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: clusterrun itself failed: RuntimeError: boom\n"
        f"  hint: report it with the traceback in {crash}\n"
    )
    assert crash.stat().st_mode & 0o777 == 0o600
    assert "RuntimeError: boom" in crash.read_text()


@pytest.mark.parametrize("module", ["clusterrun.cli.main", "click", "clusterrun.verbs.list"])
def test_ctrl_c_during_an_import_prints_no_traceback(tmp_path: Path, module: str) -> None:
    is_it = f"event == 'import' and args[0] == {module!r}"
    hook = f"lambda event, args: {is_it} and os.kill(os.getpid(), 2)"
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nsys.addaudithook({hook})\n")
    done = clusterrun("list", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
    setup = Path(__file__).parents[2] / "setup.cfg"
    assert "    clusterrun = clusterrun.__main__:main\n" in setup.read_text()
