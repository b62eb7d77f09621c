"""Jobs that clusterrun did not start, on a real Slurm: `logs` reads the files that it names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("own_memory"), pytest.mark.timeout(300)]


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Path:
    path = tmp_path / "w ork [x]"
    (path / "o ut").mkdir(parents=True)
    return path


@pytest.fixture(name="followed", scope="module", autouse=True)
def _followed(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Follow a job while the first tests run: Slurm is asked each half minute how it stands."""
    here = tmp_path_factory.mktemp("followed")
    script = "for i in 1 2 3; do echo line $i; sleep 1; done; exit 3"
    job_id = cluster.sbatch("-D", str(here), "--wrap", script)
    how = ("-f", "--exit-status", "--prefix", "none", "-n", "all")
    command = subprocess.Popen(
        [sys.executable, "-m", "clusterrun", "logs", job_id, *how],
        cwd=here,
        env={**os.environ, "XDG_STATE_HOME": str(here), "XDG_RUNTIME_DIR": str(here)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield job_id, command
    command.kill()
    command.communicate()


def logs(here: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "clusterrun", "logs", *args]
    return subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=120 * patience())


def test_names_with_spaces_and_symbols_that_slurmctld_replaces_are_found(
    cluster: Any, here: Path
) -> None:
    output = ("-o", "o ut/%x %j-%u.out", "-e", "err.%j")
    argv = ("-D", str(here), "-J", "a b=c", *output)
    job_id = cluster.sbatch(*argv, "--wrap", "echo hi; echo bad >&2")
    assert cluster.wait_job(job_id) == "COMPLETED"
    done = logs(here, job_id)
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert lines == [[job_id, "|", "hi"], [f"{job_id}.err", "!", "bad"]]
    assert done.stderr.splitlines()[0] == (
        f"note: job {job_id} was not started by clusterrun; its lines have no times"
    )


def test_an_array_is_a_file_per_task_and_a_task_is_one(cluster: Any, here: Path) -> None:
    argv = ("--array=1-2", "-D", str(here))
    job_id = cluster.sbatch(*argv, "--wrap", "echo task $SLURM_ARRAY_TASK_ID")
    for task in (1, 2):
        assert cluster.wait_job(f"{job_id}_{task}") == "COMPLETED"
    assert sorted(line.split() for line in logs(here, job_id).stdout.splitlines()) == [
        [f"{job_id}_1", "|", "task", "1"],
        [f"{job_id}_2", "|", "task", "2"],
    ]
    assert logs(here, f"{job_id}_2", "--prefix", "none").stdout == "task 2\n"


def test_the_command_line_follows_a_job_to_its_end(
    followed: tuple[str, subprocess.Popen[str]],
) -> None:
    job_id, command = followed
    out, err = command.communicate(timeout=120 * patience())
    assert out.splitlines() == ["line 1", "line 2", "line 3"]
    assert command.returncode == 3
    assert err.splitlines()[-1].startswith(f"job {job_id} FAILED")
