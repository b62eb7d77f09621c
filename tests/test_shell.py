"""The one module that starts scheduler commands, against real executables on PATH."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clusterrun.errors import SchedulerUnreachableError
from clusterrun.shared import shell
from tests.patience import patience, wait_for

Stub = Callable[[str, str], Path]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Put an executable of our own on PATH; each of its runs leaves a line in `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(shell, "PAUSES_S", (0.01, 0.01))

    def make(name: str, body: str) -> Path:
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\necho x >> {tmp_path}/calls\n{body}\n")
        file.chmod(0o755)
        return tmp_path / "calls"

    return make


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_output_status_and_errors_are_returned(stub: Stub) -> None:
    stub("squeue", "echo out; echo err >&2; exit 3")
    assert shell.run(["squeue"]) == shell.Completed(rc=3, stdout="out\n", stderr="err\n", pid=0)
    stub("sinfo", "echo 'Unable to contact slurm controller' >&2; echo ok")
    assert shell.run(["sinfo"]).stdout == "ok\n"


def test_arguments_never_pass_through_a_shell(stub: Stub, tmp_path: Path) -> None:
    stub("squeue", 'printf "%s\\0" "$@"')
    hostile = ["$(touch pwned)", "a b", "'\"", "`id`", "", "ü\n;"]
    assert shell.run(["squeue", *hostile], cwd=tmp_path).stdout.split("\0")[:-1] == hostile
    assert not (tmp_path / "pwned").exists()


def test_input_and_environment_are_what_was_given(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub("sbatch", 'cat; echo "[$ONLY][$HOME]"')
    env = {"ONLY": "1", "PATH": os.environ["PATH"]}
    assert shell.run(["sbatch"], input="text\udcff\n", env=env).stdout == "text\ufffd\n[1][]\n"
    monkeypatch.delattr(os, "memfd_create")  # as in conda's Python, for an old glibc
    assert shell.run_once(["cat"], 60, input="text").stdout == "text"


def test_a_silent_controller_is_tried_three_times_and_told_verbatim(stub: Stub) -> None:
    """A broken configuration is reported at once."""
    told = 0
    for words, tries, hint in (
        ("error: Unable to contact slurm controller (connect failure)", 3, "later"),
        ("error: Batch job submission failed: Socket timed out on send/recv operation", 3, "later"),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", 3, "later"),
        ("sbatch: fatal: Could not establish a configuration source", 1, "SLURM_CONF"),
        ("squeue: fatal: Unable to process configuration file", 1, "SLURM_CONF"),
    ):
        calls = stub("squeue", f"echo 'squeue: error: first' >&2; echo '{words}' >&2; exit 1")
        with pytest.raises(SchedulerUnreachableError) as silent:
            shell.run(["squeue"])
        told += tries
        assert (count(calls), silent.value.cause, silent.value.exit_code) == (told, words, 5)
        assert hint in silent.value.hints[0]


def test_a_controller_that_comes_back_is_not_told(stub: Stub, tmp_path: Path) -> None:
    body = (
        f"[ $(wc -l < {tmp_path}/calls) -lt 3 ] && "
        "{ echo 'Unable to contact slurm controller' >&2; exit 1; }\necho ok"
    )
    calls = stub("squeue", body)
    assert shell.run(["squeue"]).stdout == "ok\n"
    assert count(calls) == 3


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_hanging_command_and_its_children_are_killed(stub: Stub, tmp_path: Path) -> None:
    # The child keeps our pipe open: killing the command alone would not end the wait.
    calls = stub("squeue", f"sleep 617 & echo $! >> {tmp_path}/children; wait")
    begin = time.monotonic()
    with pytest.raises(SchedulerUnreachableError) as silent:
        shell.run(["squeue"], timeout_s=1)
    assert time.monotonic() - begin < 30 * patience()
    assert count(calls) == 3
    assert silent.value.cause == "the command was still running and was killed"
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 3
    wait_for(lambda: all(map(is_gone, children)), "their end, when the kernel gets to it", 10)


def test_a_command_that_does_not_die_is_not_waited_for(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs may block it."""
    alive: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(shell, "_kill", alive.append)
    stub("squeue", "exec sleep 3000")
    begin = time.monotonic()
    with pytest.raises(SchedulerUnreachableError):
        shell.run(["squeue"], timeout_s=0.2, tries=1)
    assert time.monotonic() - begin < 60 * patience()
    (process,) = alive
    process.kill()
    process.wait()
