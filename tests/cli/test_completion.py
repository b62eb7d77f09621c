"""Completion as a shell asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from clusterrun.cli.main import VERBS
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Put a `clusterrun` on PATH that is this tree's."""
    directory = tmp_path_factory.mktemp("bin")
    program = directory / "clusterrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clusterrun "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


def _run(argv: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )


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


def test_bash_completes_verbs(environ: dict[str, str]) -> None:
    assert _bash_replies(environ, "clusterrun", "") == list(VERBS)
    assert _bash_replies(environ, "clusterrun", "co") == ["config", "completion"]


def test_bash_completes_options_and_values(environ: dict[str, str]) -> None:
    assert "--all-ranks" in _bash_replies(environ, "clusterrun", "logs", "--")
    assert _bash_replies(environ, "clusterrun", "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_read_by_its_shell(shell: str, environ: dict[str, str]) -> None:
    done = _run(["clusterrun", "completion", shell], environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_CLUSTERRUN_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        assert _run([shell, "-n", "-c", done.stdout], environ).stderr == ""


def test_another_shell_is_a_mistake(environ: dict[str, str]) -> None:
    done = _run(["clusterrun", "completion", "tcsh"], environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'tcsh' is not one of" in done.stderr
