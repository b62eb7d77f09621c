"""Completion as a shell asks for it."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from select import select

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from clusterrun.cli.main import VERBS, group
from clusterrun.rundir import record
from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, submitted
from tests.patience import finished, patience


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Put a `clusterrun` on PATH that is this tree's."""
    directory = tmp_path_factory.mktemp("bin")
    program = directory / "clusterrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clusterrun "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


def _run(argv: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return finished(argv, env=environ)


def _bash_replies(environ: dict[str, str], *words: str) -> list[str]:
    """Let a real bash load the script and complete the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        'eval "$(clusterrun completion bash)"\n'
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        "complete -p clusterrun >&2\n"
        "_clusterrun_completion clusterrun\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = _run(["bash", "--norc", "-c", program], environ)
    assert "-F _clusterrun_completion clusterrun" in done.stderr
    return done.stdout.split()


def test_bash_completes_verbs_options_and_values(environ: dict[str, str]) -> None:
    assert _bash_replies(environ, "clusterrun", "") == list(VERBS)
    assert _bash_replies(environ, "clusterrun", "co") == ["config", "completion"]
    assert "--all-ranks" in _bash_replies(environ, "clusterrun", "logs", "--")


def test_script_is_read_by_its_shell(environ: dict[str, str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        done = _run(["clusterrun", "completion", shell], environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"_CLUSTERRUN_COMPLETE={shell}_complete" in done.stdout
        if shutil.which(shell):
            assert _run([shell, "-n", "-c", done.stdout], environ).stderr == ""


# What is offered, asked as click's shells ask


def _items(*words: str) -> list[CompletionItem]:
    *before, typed = words
    return ShellComplete(group, {}, "clusterrun", "_").get_completions(before, typed)


def _offered(*words: str) -> list[str]:
    return [item.value for item in _items(*words)]


JOB_VERBS = ("status", "logs", "resume", "resubmit", "cancel", "prune", "plan --compare")


@pytest.fixture(name="runs")
def _runs(here: CommandLine) -> CommandLine:
    """Return a project with two runs; the older has ended."""
    ended(submitted(here, "999", "-N2", "--job-name", "pretrain", "train.py"), "COMPLETED", 0)
    submitted(here, "4711", "-N2", "--job-name", "llama3-sft", "train.py")
    return here


def test_jobs_are_offered_newest_first_and_no_scheduler_is_asked(
    runs: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("squeue", "sacct", "scontrol", "sinfo"):
        runs.program(program, "exit 1")
    names = ["llama3-sft", "pretrain"]
    for verb in JOB_VERBS:
        assert _offered(*verb.split(), "") == ["4711", "999", *names]
        assert _offered(*verb.split(), "lla") == ["llama3-sft"]
    assert not any(runs.asked(program) for program in ("squeue", "sacct", "scontrol", "sinfo"))
    assert _items("logs", "./")[0].type == "file"
    limits: list[int] = []
    monkeypatch.setattr(record, "list_records", lambda _, limit: limits.append(limit) or [])
    assert _offered("status", "") == []
    assert 0 < max(limits) <= 20


def test_jobs_of_other_projects_are_offered_where_there_are_none(
    runs: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _offered("status", "4") == ["4711"]


def test_a_name_that_a_shell_would_run_is_not_offered(runs: CommandLine) -> None:
    submitted(runs, "4712", "-N2", "--job-name", "$(touch evil)", "train.py")
    assert _offered("status", "") == ["4712", "4711", "999", "llama3-sft", "pretrain"]


def test_choices_and_scripts_are_offered(here: CommandLine) -> None:
    assert _offered("submit", "--strategy", "zero3") == ["zero3", "zero3-offload"]
    assert [item.type for item in _items("submit", "-N", "2", "tr")] == ["file"]
    assert [item.type for item in _items("submit", "train.py", "--data", "x")] == ["file"]
    assert "--strategy" in _offered("submit", "--nodes", "2", "--st")


# Real shells

LINES = {
    "clusterrun cancel ll": "llama3-sft",
    "clusterrun logs 99": "999",
    "clusterrun submit --cluster local tra": "train.py",
}


@pytest.fixture(name="in_shell")
def _in_shell(runs: CommandLine, environ: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": environ["PATH"], "HOME": str(runs.path.parent), "TERM": "dumb"}


def _shell(name: str, environ: dict[str, str]) -> str:
    found = shutil.which(name, path=environ["PATH"])
    if found is None:
        pytest.skip(f"this machine has no {name}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_fish_completes(line: str, in_shell: dict[str, str]) -> None:
    fish = _shell("fish", in_shell)
    program = f"clusterrun completion fish | source; complete -C '{line}'"
    done = _run([fish, "--no-config", "-c", program], in_shell)
    assert LINES[line] in [answer.partition("\t")[0] for answer in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("shell", "start"),
    [
        ("bash --norc --noprofile -i", 'eval "$(clusterrun completion bash)"'),
        ("zsh -f -i", 'autoload -Uz compinit; compinit -u; eval "$(clusterrun completion zsh)"'),
    ],
)
def test_tab_completes_the_line_on_a_terminal(
    shell: str, start: str, in_shell: dict[str, str]
) -> None:
    name, *options = shell.split()
    terminal = _Terminal([_shell(name, in_shell), *options], in_shell)
    try:
        terminal.send(f"{start}; echo LOAD''ED\n", until="LOADED")
        for line, completed in LINES.items():
            whole = f"{line.rpartition(' ')[0]} {completed}"
            terminal.send(f"{line}\t", until=whole)
            terminal.send("\x15echo DO''NE\n", until="DONE")
    finally:
        terminal.close()


class _Terminal:
    """A shell on a terminal."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(argv[0], argv, {**environ, "COLUMNS": "200"})

    def send(self, text: str, *, until: str) -> None:
        """Type a text and read until an answer is shown."""
        os.write(self._fd, text.encode())
        shown, deadline = "", time.monotonic() + 60 * patience()
        while until not in shown:
            assert time.monotonic() < deadline, f"no '{until}' in {shown!r}"
            if select([self._fd], [], [], 0.1)[0]:
                shown += os.read(self._fd, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)
        os.waitpid(self._pid, 0)
