"""Jobs that clusterrun did not start, by what Slurm says of them, and log files by their path."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clusterrun.config.spec import Cluster
from tests.logs.corpus import T0, raw
from tests.logs.runs import LogsCommand, new_project


@pytest.fixture
def shell(tmp_path: Path) -> LogsCommand:
    """Give a shell in a directory without runs, and a Slurm that knows no job."""
    project = new_project(tmp_path / "old", job_id="3", cluster=Cluster.SLURM)
    here = dataclasses.replace(project, path=tmp_path / "here")
    (here.path / "bin").mkdir(parents=True)
    here.environ["PATH"] = f"{here.path / 'bin'}:/usr/bin:/bin"
    slurm_answers(here, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    return here


def slurm_answers(here: LogsCommand, script: str) -> None:
    scontrol = here.path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{script}\n")
    scontrol.chmod(0o755)


def slurm_knows(here: LogsCommand, *rows: str) -> None:
    slurm_answers(here, "\n".join(["cat <<'E'", *rows, "E"]))


def row(
    ids: str,
    *,
    stdout: Path | str,
    stderr: Path | str = "",
    state: str = "RUNNING",
    reason: str = "None",
) -> str:
    times = "StartTime=2026-11-21T10:00:01 EndTime=Unknown"
    return (
        f"{ids} JobName=x UserId=me(0) GroupId=g(0) JobState={state} Reason={reason} Restarts=0 "
        f"{times} NodeList=n1 Command=/gone/x.sh WorkDir=/w StdErr={stderr} StdIn=/dev/null "
        f"StdOut={stdout} OOMKillStep=0"
    )


def test_the_files_that_slurm_names_are_read(shell: LogsCommand) -> None:
    slurm_knows(
        shell,
        *(
            row(
                f"JobId={4710 + task} ArrayJobId=4711 ArrayTaskId={task}",
                stdout=shell.path / f"o ut-{task}.log",
                stderr=shell.path / "all.err",
            )
            for task in (1, 2)
        ),
    )
    for name in ("o ut-1.log", "o ut-2.log", "all.err", "slurm-4711.out"):
        (shell.path / name).write_text(f"in {name}\n")
    done = shell.logs("4711")
    assert sorted(done.stdout.splitlines()) == [
        "4711_1       | in o ut-1.log",
        "4711_1.err   ! in all.err",
        "4711_2       | in o ut-2.log",
    ]
    assert done.stderr.splitlines()[0] == (
        "note: job 4711 was not started by clusterrun; its lines have no times"
    )
    assert shell.lines("4711", "--stream", "err", "--prefix", "none") == ["in all.err"]
    assert len(shell.lines("4711", "--path")) == 3
    (found,) = [json.loads(line) for line in shell.lines("4711", "--json", "--stream", "err")]
    assert (found["text"], found["ts"], found["rank"]) == ("in all.err", None, None)
    assert found["file"] == str(shell.path / "all.err")


def test_what_plain_lines_do_not_say_cannot_be_asked_for(shell: LogsCommand) -> None:
    slurm_knows(shell, row("JobId=4711", stdout=shell.path / "a.log"))
    (shell.path / "a.log").write_text("x\n")
    for args, what in ((("--since", "5m"), "--since: the lines"), (("--rank", "0"), "the lines")):
        done = shell.logs("4711", *args)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-2].startswith(f"error: {what} of job 4711 have no ")


def test_a_waiting_job_says_why_and_shows_no_earlier_jobs_file(shell: LogsCommand) -> None:
    file = shell.path / "train.log"
    file.write_text("of the job before\n")
    slurm_knows(shell, row("JobId=4711", stdout=file, state="PENDING", reason="Resources"))
    done = shell.logs("4711")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1] == "job 4711 is pending: waiting for free nodes"


def test_a_running_job_without_output_names_the_file(shell: LogsCommand) -> None:
    slurm_knows(shell, row("JobId=4711", stdout="/gone/train.log"))
    assert shell.logs("4711").stderr.splitlines()[-1] == (
        "job 4711 is RUNNING; nothing has been written yet to /gone/train.log"
    )


def test_a_symbol_that_slurm_left_in_a_name_is_pointed_out(shell: LogsCommand) -> None:
    slurm_knows(shell, row("JobId=4711", stdout="/gone/%N.log"))
    assert (
        "note: cannot expand the % in /gone/%N.log; only the node knows its value"
        in shell.logs("4711").stderr
    )


def test_a_file_that_cannot_be_looked_at_is_reported_in_the_systems_words(
    shell: LogsCommand,
) -> None:
    (shell.path / "locked").symlink_to("locked")  # root may enter any directory, but no loop
    slurm_knows(shell, row("JobId=4711", stdout=shell.path / "locked" / "x.out"))
    done = shell.logs("4711")
    assert done.returncode == 1
    assert ": Too many levels of symbolic links" in done.stderr


def test_a_run_of_clusterrun_is_recognised_by_its_batch_output(shell: LogsCommand) -> None:
    shell.write("n1", raw(T0, 0, "o", "stamped"))
    slurm_knows(shell, row("JobId=4711", stdout=shell.paths.batch_output))
    assert shell.lines("4711", "-a", "--prefix", "none") == ["stamped"]


def test_a_job_that_slurm_forgot_can_still_be_read_by_its_file(shell: LogsCommand) -> None:
    (shell.path / "slurm-4711.out").write_text("one\ntwo\n")
    done = shell.logs("4711")
    assert done.returncode == 4
    assert "pass its log file; Slurm forgets a job a few minutes after it ends" in done.stderr
    done = shell.logs("slurm-4711.out", "-n", "1")
    assert (done.returncode, done.stdout) == (0, "slurm-4711.out   | two\n")
