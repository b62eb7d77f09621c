"""A scheduler is asked once in ten seconds, however many processes want to know."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterrun.backends import cache
from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.slurm.backend import SlurmBackend
from clusterrun.shared.state import JobState
from tests.patience import patience

from .conftest import Stubs

RUNNING = 'echo "7|RUNNING|n1|0:02|10:00|1|N/A|None"'


def job(state: JobState = JobState.RUNNING, **values: object) -> SchedulerJob:
    return SchedulerJob(job_id="7", state=state, source="squeue", **values)  # type: ignore[arg-type]


def test_the_same_question_is_answered_from_memory(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.add("squeue", RUNNING)
    stubs.add("sacct")
    first = SlurmBackend().query(["7"])
    assert SlurmBackend().query(["7"]) == first
    assert len(stubs.calls("squeue")) == 1
    SlurmBackend().query(["7"], max_age_s=0)  # an answer of now
    SlurmBackend().query(["7", "8"])  # a job that was submitted just now
    SlurmBackend(slurm_cluster="tuxA").query(["7"])
    monkeypatch.setenv("SLURM_CONF", "/another/slurm.conf")
    SlurmBackend().query(["7"])
    assert len(stubs.calls("squeue")) == 5


def test_an_old_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask() -> cache.Answer:
        asked.append(1)
        return {"7": job()}

    now = time.time()
    for moment in (now, now + 9, now + 11, now - 3600):  # the last: a clock was set back
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        cache.through(("7",), cache.TTL_S, ask)
    assert len(asked) == 3


def test_processes_that_ask_at_once_cost_one_call(stubs: Stubs) -> None:
    stubs.add("squeue", f"/bin/sleep 0.5\n{RUNNING}")
    code = (
        "from clusterrun.backends.slurm.backend import SlurmBackend\n"
        "print(SlurmBackend().query(['7'])['7'].state.value)"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert {process.communicate(timeout=60 * patience())[0] for process in many} == {b"RUNNING\n"}
    assert len(stubs.calls("squeue")) == 1


def test_a_silent_scheduler_is_not_remembered(stubs: Stubs) -> None:
    stubs.add("squeue", "exit 1")
    stubs.add("sacct", "exit 1")
    for _ in range(2):
        with pytest.raises(Exception, match="squeue failed"):
            SlurmBackend().query(["7"])
    assert len(stubs.calls("squeue")) == 2


def test_a_damaged_memory_is_asked_anew(tmp_path: Path) -> None:
    for number, text in enumerate(("", "{", "[]", '{"asked_at": 9e99, "answer": {}}')):
        cache.through(("7",), 10, lambda: {"7": job()})
        (file,) = (tmp_path / "runtime" / "clusterrun").glob("*.json")
        file.write_text(text)
        anew = job(reason=f"anew {number}")
        assert cache.through(("7",), 10, lambda anew=anew: {"7": anew}) == {"7": anew}


def test_a_place_that_cannot_be_written_costs_the_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert cache.through(("7",), 10, lambda: {"7": job()}) == {"7": job()}


def test_what_is_remembered_is_private_and_forgotten_if_nobody_asks(tmp_path: Path) -> None:
    cache.through(("7",), 10, lambda: {"7": job()})
    directory = tmp_path / "runtime" / "clusterrun"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    cache.through(("8",), 10, lambda: {"8": job()})
    assert len(list(directory.glob("*.json"))) == 1
