"""Jobs that clusterrun did not start, on a real Slurm: where it writes, and who remembers it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun.logs.foreign import ForeignJob, ask_state, find_foreign, look_again
from clusterrun.state import JobState
from tests.patience import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PER_TASK = "srun -o 't-%j-%2t.log' -e 't-%j-%2t.err' bash -c 'echo $SLURM_PROCID; echo bad >&2'"


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


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


@pytest.fixture(name="forgetful")
def _forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slurmctld know no job, as it does 5 minutes after a job's end; accounting is real."""
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")


def found(text: str, here: Path) -> ForeignJob:
    job = find_foreign(text, here)
    assert job is not None
    return job


def sources(job: ForeignJob) -> set[tuple[str, int | None, str, str]]:
    return {(f.label, f.rank, f.stream.label, f.path.read_text().strip()) for f in job.files}


def run_per_task(cluster: Any, here: Path, script: Path) -> str:
    script.write_text(f"#!/bin/bash\n#SBATCH -o 'o-%x.%u'\necho batch; cd '{here}'\n{PER_TASK}\n")
    argv = ("-N2", "--ntasks-per-node=2", "-D", str(here), "-J", "a Comment=b", str(script))
    job_id: str = cluster.sbatch(*argv)
    assert cluster.wait_job(job_id) == "COMPLETED"
    return job_id


def per_task_sources(job_id: str) -> set[tuple[str, int | None, str, str]]:
    out = {(job_id, rank, "out", str(rank)) for rank in range(4)}
    return out | {(job_id, rank, "err", "bad") for rank in range(4)}


def test_sruns_files_and_the_batch_output_are_found_with_their_tasks(
    cluster: Any, here: Path
) -> None:
    job_id = run_per_task(cluster, here, here / "train job.sh")
    job = found(job_id, here)
    assert sources(job) == {(job_id, None, "out", "batch")} | per_task_sources(job_id)
    assert (job.name, job.state) == ("a Comment=b", JobState.COMPLETED)


def test_what_slurmctld_forgot_accounting_remembers(
    cluster: Any, tmp_path: Path, forgetful: None
) -> None:
    here = tmp_path  # accounting keeps the command line without its quotes
    job_id = run_per_task(cluster, here, here / "train.sh")

    def told() -> ForeignJob | None:
        job = find_foreign(job_id, here)
        return job if job and job.name == "a Comment=b" and len(job.files) > 8 else None

    job = wait_for(told, "what accounting tells at last")
    assert sources(job) == {(job_id, None, "out", "batch")} | per_task_sources(job_id)
    assert find_foreign("9999999", here) is None


def test_a_pattern_that_slurm_completes_on_the_node_is_found(cluster: Any, here: Path) -> None:
    pattern = "o ut/%x %5j-%A_%a-%N-%n-%2t-%s-%u%%-%J.out"
    job_id = cluster.sbatch("-D", str(here), "-J", "x StdOut=y", "-o", pattern, "--wrap", "echo hi")
    assert cluster.wait_job(job_id) == "COMPLETED"
    assert sources(found(job_id, here)) == {(job_id, None, "out", "hi")}


def test_an_array_is_a_source_per_task_and_a_task_is_one(cluster: Any, here: Path) -> None:
    argv = ("--array=1-2", "-D", str(here), "-o", "arr-%A_%4a.out")
    job_id = cluster.sbatch(*argv, "--wrap", "echo task $SLURM_ARRAY_TASK_ID")
    for task in (1, 2):
        assert cluster.wait_job(f"{job_id}_{task}") == "COMPLETED"
    assert sources(found(job_id, here)) == {
        (f"{job_id}_1", None, "out", "task 1"),
        (f"{job_id}_2", None, "out", "task 2"),
    }
    assert sources(found(f"{job_id}_2", here)) == {(f"{job_id}_2", None, "out", "task 2")}


def test_a_requeued_job_waits_and_its_log_is_still_there(cluster: Any, here: Path) -> None:
    argv = ("--requeue", "--open-mode=append", "-D", str(here), "-o", "rq-%j.out")
    job_id = cluster.sbatch(*argv, "--wrap", "echo once; sleep 60")
    log = here / f"rq-{job_id}.out"
    wait_for(lambda: log.exists() and log.read_text(), "the job's first line")
    job = found(job_id, here)
    assert job.state is JobState.RUNNING
    cluster.run(["scontrol", "requeue", job_id])
    wait_for(lambda: ask_state(job, max_age_s=0) is JobState.PENDING, "the requeue")
    assert {text.split()[0] for *_, text in sources(look_again(job))} == {"once"}
    cluster.run(["scancel", job_id])
    wait_for(lambda: ask_state(job, max_age_s=0) is JobState.CANCELLED, "the end")


def test_without_accounting_a_name_with_the_jobs_number_is_enough(
    cluster_no_accounting: Any, here: Path
) -> None:
    assert find_foreign("9999999", here) is None
    (here / "slurm-9999999.out").write_text("old")
    assert sources(found("9999999", here)) == {("slurm-9999999.out", None, "out", "old")}
    job_id = cluster_no_accounting.sbatch("-D", str(here), "--wrap", "echo new")
    assert cluster_no_accounting.wait_job(job_id) == "COMPLETED"
    assert sources(found(job_id, here)) == {(job_id, None, "out", "new")}


def logs(here: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "clusterrun", "logs", *args]
    return subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=120)


def test_the_command_line_reads_a_job_that_it_did_not_start(
    cluster: Any, here: Path, tmp_path: Path
) -> None:
    job_id = run_per_task(cluster, here, tmp_path / "job.sh")
    done = logs(here, job_id, "--rank", "2", "--prefix", "none")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["2", "bad"])
    assert done.stderr.startswith(f"note: job {job_id} was not started by clusterrun; it has 9 ")
    errors = logs(here, job_id, "--stream", "err", "--prefix", "none").stdout.splitlines()
    assert errors == ["bad"] * 4
    assert logs(here, job_id, "-g", "^batch$", "--prefix", "none").stdout == "batch\n"
    assert sorted(logs(here, job_id, "--rank", "0", "-o", "raw").stdout) == sorted("0\nbad\n")
    assert len(logs(here, job_id, "--path").stdout.splitlines()) == 9
    listed = logs(here, job_id, "--list").stdout.splitlines()
    assert len([row for row in listed if f"/t-{job_id}-" in row]) == 8
    found = [json.loads(line) for line in logs(here, job_id, "--json").stdout.splitlines()]
    assert sorted(entry["text"] for entry in found) == ["0", "1", "2", "3", *["bad"] * 4, "batch"]
    done = logs(here, job_id, "--since", "5m")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"error: --since: the lines of job {job_id} carry no times",
    )


def test_the_command_line_follows_a_foreign_job_to_its_end(
    followed: tuple[str, subprocess.Popen[str]],
) -> None:
    job_id, command = followed
    out, err = command.communicate(timeout=120)
    assert out.splitlines() == ["line 1", "line 2", "line 3"]
    assert command.returncode == 3
    assert err.splitlines()[-1].startswith(f"job {job_id} FAILED")


def test_a_job_that_nobody_knows_is_not_found(cluster: Any, here: Path) -> None:
    done = logs(here, "987654")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: no job or run '987654' in ")
