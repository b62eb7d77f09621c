"""What a host answers is a status of its runs, or nothing: no path, no other job, no exception."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.hosts import backend, homes
from clusterrun.backends.hosts.crew import Link, Pipe
from clusterrun.backends.local.backend import last_number, remember_number
from clusterrun.backends.status import JobStatus
from clusterrun.errors import SubmissionError
from clusterrun.rundir import create, record
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.record import Home, JobRecord
from clusterrun.shared import shell
from clusterrun.shared.state import JobId, JobState
from tests.backends.builders import make_bundle, make_plan

NAN, OLD = float("nan"), ["H7"]
STATUS = ({"record": None}, {"record": "x"}, {"start": "soon"}, {"start": NAN}, {"end": 1e300})
RECORD = (
    *({"job_id": each, "earlier_job_ids": OLD} for each in ("Hx", "H" + "9" * 30, 8, None)),
    *({"earlier_job_ids": [*OLD, each]} for each in ("../../../precious", "4711")),
    *({"job_id": each} for each in ("H8", "")),
    {"earlier_job_ids": [f"H{n}" for n in range(10_000, 20_000)]},
)
LINES = ("", "null", "[" * 200_000, '[{"a"', '"x"', "[{}]", "[]", "[null, null]")


@pytest.fixture(name="runs")
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunsDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember_number(9)
    return RunsDir(root=tmp_path / "a" / "runs")


def make(runs: RunsDir, job_id: str, host: str = "") -> JobRecord:
    plan = make_plan(runs.root.parent)
    paths = create.create_run(runs, "demo", f"run-{job_id}", make_bundle(plan))
    home = Home(host=host, run_dir=f"/far/{job_id}", python=sys.executable) if host else None
    made = record.new_record(plan, paths, argv=(), now=1.0)
    made = dataclasses.replace(made, job_id=JobId(job_id), home=home)
    record.write(made)
    record.remember_home(made)
    record.link_job(paths, made.job_id)
    return made


def plain(made: JobRecord) -> dict[str, Any]:
    assert made.home
    there = dataclasses.replace(made, run_dir=made.home.run_dir, home=None)
    return dataclasses.asdict(JobStatus(record=there, state=JobState.RUNNING))


def answers(monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    def run_once(argv: list[str], *_: Any, **__: Any) -> shell.Completed:
        text = next(line for host, line in lines.items() if host in argv)
        return shell.Completed(rc=0, stdout=f"welcome\n{homes.MARK}{text}\n", stderr="")

    monkeypatch.setattr(shell, "run_once", run_once)


@pytest.mark.parametrize("bad", [*STATUS, {"state": "WON"}, {"notes": [1]}, *RECORD, *LINES])
def test_a_bad_answer_costs_one_row_and_changes_nothing(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    mine, good, here = make(runs, "H7", "gpu1"), make(runs, "H8", "gpu2"), make(runs, "4711")
    data = plain(mine)
    (data["record"] if bad in RECORD else data).update(bad if bad not in LINES else {})
    line = bad if bad in LINES else json.dumps([data])
    answers(monkeypatch, gpu1=line, gpu2=json.dumps([plain(good)]))
    before = {link.name: link.readlink() for link in runs.by_job.iterdir()}
    first, second = homes.ask([mine, good])
    assert (first.record, first.state, second.state) == (mine, JobState.UNKNOWN, JobState.RUNNING)
    assert "gpu1" in str(first.error)
    assert {link.name: link.readlink() for link in runs.by_job.iterdir()} == before
    assert (record.read(mine.paths), record.read(here.paths)) == (mine, here)
    assert last_number(runs) == 9
    assert not (runs.root.parents[1] / "precious").exists()


def test_a_host_names_new_jobs_of_its_run_and_no_other_runs(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = make(runs, "H7", "gpu1"), make(runs, "H8", "gpu2")
    data, changed = plain(made), {"job_id": "H12", "earlier_job_ids": ("H7", "H8"), "nodes": 3}
    data["record"].update(changed, earlier_job_ids=["H7", "H8"], name="x", user="eve")
    answers(monkeypatch, gpu1=json.dumps([data]))
    (found,) = homes.ask([made])
    assert found.record == dataclasses.replace(made, **changed) == record.read(made.paths)
    named = {name: record.resolve_job(name, [runs]).run_id for name in ("H7", "H8", "H12")}
    assert named == {"H7": made.run_id, "H8": other.run_id, "H12": made.run_id}
    assert last_number(runs) == 12


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch, runs: RunsDir) -> None:
    argv = ["sh", "-c", "cat; exec head -c 9000000 /dev/zero"]
    monkeypatch.setattr(homes, "ssh", lambda *_: argv)
    monkeypatch.setattr(homes, "ANSWER_BYTES", 1000)
    (found,) = homes.ask([make(runs, "H7", "gpu1")])
    assert "clusterrun does not start on gpu1" in str(found.error)


PLACE = {"is_here": True}
READY = {"job_id": "H10", "run_dir": "/r", "python": "python"}
IDS = ({"job_id": each} for each in ("../x", "4711", "H9", "", 10, None))
REFUSED = ({"exit": 77}, {"message": 1}, {"hints": "x"}, {"message": None})


@pytest.mark.parametrize(
    "answers",
    [
        *([PLACE, {**READY, **each}] for each in (*IDS, {"run_dir": None})),
        *([PLACE, {}], [{"is_here": "x"}], [PLACE, PLACE]),
        *([{"refused": {"message": "no", **each}}] for each in REFUSED),
    ],
)
def test_a_controller_that_answers_nonsense_is_refused(
    runs: RunsDir, answers: list[dict[str, Any]]
) -> None:
    first = Link(name="gpu1", argv=(), script=b"")
    for each in answers:
        first.handle({"kind": "answer", **each})
    plan = dataclasses.replace(make_plan(runs.root.parent), hosts=("gpu1",))
    with pytest.raises(SubmissionError, match="gpu1 sent an unexpected answer"):
        backend._negotiate(first, plan, make(runs, "H9").paths, (), 9)


def test_a_message_that_is_too_deep_ends_the_connection() -> None:
    assert Pipe(io.BytesIO(b"[" * 200_000), io.BytesIO()).receive() is None


def test_a_damaged_run_at_a_host_takes_no_other_along(runs: RunsDir) -> None:
    good, bad = make(runs, "L7"), make(runs, "L8")
    bad.paths.record.write_text("{")
    gone = str(runs.root / "demo" / "gone")
    found = json.loads(homes.answer([good.run_dir, bad.run_dir, gone]).removeprefix(homes.MARK))
    assert found[0]["record"]["job_id"] == "L7"
    assert found[1:] == [{}, None]
