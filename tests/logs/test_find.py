"""Which job a number means: that of the project and of the Slurm at hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clusterrun.config.spec import Cluster
from clusterrun.rundir import record as records
from tests.logs.corpus import T0, raw
from tests.logs.runs import LogsCommand, new_project


def slurm_knows(here: LogsCommand, user: str, workdir: Path) -> None:
    """Let scontrol know a job 3 of a user, and count the questions."""
    times = "SubmitTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:00:01 EndTime=Unknown"
    row = (
        f"JobId=3 JobName=x UserId={user}(0) GroupId=g(0) JobState=RUNNING {times} "
        f"Command=/gone/x.sh WorkDir={workdir} "
        f"StdErr={workdir}/slurm-3.out StdIn=/dev/null StdOut={workdir}/slurm-3.out Power="
    )
    scontrol = here.path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho asked >> {here.path}/asked\ncat <<'E'\n{row}\nE\n")


@pytest.fixture
def elsewhere(tmp_path: Path) -> LogsCommand:
    """Give a shell in a directory without runs; a run of another one has been job 3."""
    project = new_project(tmp_path / "old", job_id="3", cluster=Cluster.SLURM)
    project.write("n1", raw(T0, 0, "o", "of the old run"))
    here = dataclasses.replace(project, path=tmp_path / "here")
    (here.path / "bin").mkdir(parents=True)
    for name in ("scontrol", "squeue"):
        program = here.path / "bin" / name
        program.write_text("#!/bin/sh\necho 'Invalid job id specified' >&2\nexit 1\n")
        program.chmod(0o755)
    here.environ["PATH"] = f"{here.path / 'bin'}:/usr/bin:/bin"
    remember(here, tmp_path / "old" / "runs")
    return here


def remember(here: LogsCommand, *roots: Path) -> None:
    known = Path(here.environ["XDG_STATE_HOME"]) / "clusterrun" / "roots.json"
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps({"roots": [str(root) for root in roots]}))


def test_a_run_of_another_place_is_named_where_an_id_alone_leads_there(
    elsewhere: LogsCommand,
) -> None:
    done = elsewhere.logs("3", "-a", "--prefix", "none")
    assert done.stdout == "of the old run\n"
    assert done.stderr == f"using job 3 of {elsewhere.record.run_dir}\n"


def test_the_users_own_job_of_the_slurm_at_hand_comes_before_it(elsewhere: LogsCommand) -> None:
    slurm_knows(elsewhere, records.current_user(), elsewhere.path)
    (elsewhere.path / "slurm-3.out").write_text("of the job here\n")
    done = elsewhere.logs("3", "--prefix", "none")
    assert done.stdout == "of the job here\n"
    assert done.stderr.splitlines()[0] == (
        "note: job 3 was not started by clusterrun; its lines have no times"
    )


def test_another_users_job_of_that_number_does_not(elsewhere: LogsCommand) -> None:
    slurm_knows(elsewhere, "somebody", elsewhere.path)
    (elsewhere.path / "slurm-3.out").write_text("of the job here\n")
    assert elsewhere.lines("3", "--prefix", "none") == ["of the old run"]


def test_of_several_runs_elsewhere_none_is_guessed_but_the_job_at_hand_is_found(
    elsewhere: LogsCommand, tmp_path: Path
) -> None:
    new_project(tmp_path / "other", job_id="3", cluster=Cluster.SLURM)
    remember(elsewhere, tmp_path / "old" / "runs", tmp_path / "other" / "runs")
    done = elsewhere.logs("3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 jobs have the id 3, but none in ")
    slurm_knows(elsewhere, records.current_user(), elsewhere.path)
    (elsewhere.path / "slurm-3.out").write_text("of the job here\n")
    assert elsewhere.lines("3", "--prefix", "none") == ["of the job here"]


def test_nobody_is_asked_for_a_run_of_the_project_at_hand(elsewhere: LogsCommand) -> None:
    slurm_knows(elsewhere, records.current_user(), elsewhere.path)
    at_hand = dataclasses.replace(elsewhere, path=Path(elsewhere.record.run_dir).parents[2])
    done = at_hand.logs("3", "-a", "--prefix", "none")
    assert (done.stdout, done.stderr) == ("of the old run\n", "")
    assert not (elsewhere.path / "asked").exists()
