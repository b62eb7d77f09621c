"""Scripts that save in their own handlers have the time that Slurm gives them, and continue."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.patience import wait_for
from tests.road import LIGHT, SCRIPTS, Project, project
from tests.slurm.test_preemption import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]

TWO = ("-N2", "--gpus-per-node", "1", "--cpus-per-task", "1", *LIGHT)
NEWER = pytest.param("newer_slurm_cluster", id="a newer Slurm", marks=pytest.mark.long)


@pytest.fixture(name="slurm", params=[pytest.param("cluster", id="the system's Slurm"), NEWER])
def _slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster: Cluster = request.getfixturevalue(request.param)
    yield cluster
    cluster.run(["scancel", "--me"])
    cluster.wait_no_processes(60)


@pytest.fixture(name="here")
def _here(slurm: Cluster, tmp_path: Path) -> Project:
    made = project(tmp_path / "project", tmp_path / "state")
    for script in (SCRIPTS / "styles").glob("*.py"):
        shutil.copy(script, made.path)
    made.extra.update(slurm.env)
    return made


def long(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("event", "words", "state"),
    [
        ("preempt", "SIGTERM 7 0", "COMPLETED"),
        ("scancel", "SIGTERM 7 0", "CANCELLED"),
        long("preempt", "SIGTERM 25 0", "COMPLETED"),
        long("scancel", "SIGTERM 25 0", "CANCELLED"),
        long("limit", "SIGTERM 25 0", "COMPLETED"),
        long("limit", "SIGUSR1 25 143", "COMPLETED"),
        long("limit", "SIGUSR1 2 0 requeue", "COMPLETED"),
        long("cancel", "SIGUSR2 25 0", "CANCELLED"),
    ],
)
def test_a_script_saves_and_its_run_continues_or_ends(
    here: Project, slurm: Cluster, event: str, words: str, state: str
) -> None:
    options = {"preempt": ("-p", "low"), "limit": ("-t", "1", "--set", "slurm.signal=USR1@30")}
    job_id = here.submit(*TWO, *options.get(event, ()), "own_handler.py", *words.split())
    here.wait_for_line(job_id, "ready", 2)
    if event == "preempt":
        preempt(slurm, job_id)
    elif event == "scancel":
        slurm.run(["scancel", job_id])
    elif event == "cancel":
        assert here.cli("cancel", "--checkpoint", job_id).returncode == 0

    def has_ended() -> bool:
        slurm.start_requeued(job_id)
        return bool(here.json("status", job_id)["state"] == state)

    wait_for(has_ended, f"the end of job {job_id} as {state}", 300)
    restarts = int(state == "COMPLETED")
    logs = "".join(path.read_text() for path in here.run_dir(job_id).glob("logs/a*/*.log"))
    counts = [logs.count(text) for text in ("handles SIG", "has saved", "continues")]
    assert counts == [2, 2, 2 * restarts], logs
    found = here.json("status", job_id)
    assert (found["state"], len(found["attempts"])) == (state, 1 + restarts), logs
    assert f"Restarts={restarts} " in slurm.run(["scontrol", "show", "job", job_id]).stdout


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    "argv",
    [
        # One rank: of several, Lightning's handler waits for those that wait for it in a step.
        "-t 2 --set slurm.signal=SIGUSR1@60 --nproc-per-node 1 lit.py 1 1 1",
        "-p low hf_trainer.py --max_steps=3000 --enable_jit_checkpoint",
    ],
)
def test_lightning_and_transformers_save_and_continue(
    here: Project, slurm: Cluster, argv: str
) -> None:
    job_id = here.submit("-N1", "--device", "cpu", "--cpus-per-task", "2", *argv.split())
    here.wait_for_event(job_id, "step")
    if "low" in argv:
        preempt(slurm, job_id)

    def has_continued() -> bool:
        slurm.start_requeued(job_id)
        return any(event["step"] > 0 for event in here.events_of(job_id, "resumed"))

    wait_for(has_continued, "a step to continue from", 300)
    assert "Restarts=1 " in slurm.run(["scontrol", "show", "job", job_id]).stdout
