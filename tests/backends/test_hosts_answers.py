"""What a host answers is a status of its runs, or nothing: no path, no other job, no exception."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.hosts import backend, homes
from clusterrun.backends.hosts.frames import Pipe
from clusterrun.backends.local import job_ids
from clusterrun.backends.status import JobStatus
from clusterrun.errors import SubmissionError
from clusterrun.rundir import create, known_homes, record
from clusterrun.rundir.paths import RunsDir
from clusterrun.rundir.record import Home, JobRecord
from clusterrun.shared import shell
from clusterrun.shared.job_id import JobId
from clusterrun.shared.state import JobState
from tests.backends.builders import make_bundle, make_plan

Change = Callable[[dict[str, Any]], object]


def of_record(**fields: Any) -> Change:
    return lambda status: status["record"].update(fields)


HOSTILE: dict[str, Change] = {
    "no status": lambda status: status.clear(),
    "no record": lambda status: status.update(record=None),
    "text as record": lambda status: status.update(record="x"),
    "text as time": lambda status: status.update(start="soon"),
    "no number": lambda status: status.update(start=float("nan")),
    "an endless time": lambda status: status.update(end=1e300),
    "an unknown state": lambda status: status.update(state="WON"),
    "numbers as notes": lambda status: status.update(notes=[1]),
    "a path": of_record(earlier_job_ids=["H7", "../../../precious"]),
    "no digits": of_record(job_id="Hx"),
    "a huge id": of_record(job_id="H" + "9" * 30, earlier_job_ids=["H7"]),
    "a job of Slurm": of_record(earlier_job_ids=["H7", "4711"]),
    "another job only": of_record(job_id="H8"),
    "no job": of_record(job_id=""),
    "many jobs": of_record(earlier_job_ids=[f"H{n}" for n in range(10_000, 20_000)]),
}
LINES = {
    "nothing": "",
    "null": "null",
    "deep": "[" * 200_000,
    "a half": '[{"record"',
    "text": '"x"',
}


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job_ids.remember_number(9)


@pytest.fixture(name="runs")
def _runs(tmp_path: Path) -> RunsDir:
    return RunsDir(root=tmp_path / "a" / "runs")


def make(runs: RunsDir, job_id: str, host: str = "") -> JobRecord:
    plan = make_plan(runs.root.parent)
    paths = create.create_run(runs, "demo", f"run-{job_id}", make_bundle(plan))
    home = Home(host=host, run_dir=f"/far/{job_id}", python=sys.executable) if host else None
    made = record.new_record(plan, paths, argv=(), now=1.0)
    made = dataclasses.replace(made, job_id=JobId(job_id), home=home)
    record.write(made)
    known_homes.remember_home(made)
    record.link_job(runs, made.job_id, paths)
    return made


def plain(made: JobRecord) -> dict[str, Any]:
    assert made.home
    there = dataclasses.replace(made, run_dir=made.home.run_dir, home=None)
    status = JobStatus(record=there, state=JobState.RUNNING)
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(status)))
    return found


def answers(monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    """Let each host answer a line."""

    def run_once(argv: list[str], *_: Any, **__: Any) -> shell.Completed:
        text = next(line for host, line in lines.items() if host in argv)
        return shell.Completed(rc=0, stdout=f"welcome\n{homes.MARK}{text}\n", stderr="")

    monkeypatch.setattr(shell, "run_once", run_once)


@pytest.mark.parametrize("name", [*HOSTILE, *LINES])
def test_a_bad_answer_costs_one_row_and_changes_nothing(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bad, good, here = make(runs, "H7", "gpu1"), make(runs, "H8", "gpu2"), make(runs, "4711")
    data = plain(bad)
    if name in HOSTILE:
        HOSTILE[name](data)
    line = LINES.get(name, json.dumps([data, {}]))
    answers(monkeypatch, gpu1=line, gpu2=json.dumps([plain(good)]))
    before = {link.name: link.readlink() for link in runs.by_job.iterdir()}
    first, second = homes.ask([bad, good])
    assert (first.record, first.state, second.state) == (bad, JobState.UNKNOWN, JobState.RUNNING)
    assert "gpu1" in str(first.error)
    assert {link.name: link.readlink() for link in runs.by_job.iterdir()} == before
    assert (record.read(bad.paths), record.read(here.paths)) == (bad, here)
    assert job_ids.last_number(runs) == 9
    assert not (runs.root.parents[1] / "precious").exists()


def test_a_host_names_new_jobs_of_its_run_and_no_other_runs(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = make(runs, "H7", "gpu1"), make(runs, "H8", "gpu2")
    data = plain(made)
    of_record(job_id="H12", earlier_job_ids=["H7", "H8"], name="x", user="eve", nodes=3)(data)
    answers(monkeypatch, gpu1=json.dumps([data]))
    (found,) = homes.ask([made])
    changed = {"job_id": "H12", "earlier_job_ids": ("H7", "H8"), "nodes": 3}
    assert found.record == dataclasses.replace(made, **changed) == record.read(made.paths)
    named = {name: record.resolve_job(name, [runs]).run_id for name in ("H7", "H8", "H12")}
    assert named == {"H7": made.run_id, "H8": other.run_id, "H12": made.run_id}
    assert job_ids.last_number(runs) == 12


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch, runs: RunsDir) -> None:
    argv = ["sh", "-c", "cat; exec head -c 9000000 /dev/zero"]
    monkeypatch.setattr(homes, "ssh", lambda *_: argv)
    monkeypatch.setattr(homes, "ANSWER_BYTES", 1000)
    done = shell.run_once(argv, 60, input="asked", most=1000)
    assert (done.rc, len(done.stdout), done.stdout[:5]) == (0, 1000, "asked")
    (found,) = homes.ask([make(runs, "H7", "gpu1")])
    assert "clusterrun does not run on gpu1" in str(found.error)


PLACE = {"kind": "place", "is_here": True}
READY = {"kind": "ready", "job_id": "H10", "run_dir": "/r", "python": "python", "notes": []}
REFUSED = {"kind": "refused", "message": "m", "hints": [], "cause": None, "exit": 1}


@pytest.mark.parametrize(
    "frames",
    [
        *(
            [PLACE, {**READY, "job_id": each}]
            for each in ("../x", "4711", "L10", "H9", "", 10, None)
        ),
        *([PLACE, {**READY, **each}] for each in ({"notes": 5}, {"run_dir": None})),
        [PLACE, {"kind": "ready"}],
        [PLACE, {"kind": "note", "text": {}}],
        [{"kind": "place"}],
        *([{**REFUSED, **each}] for each in ({"exit": 77}, {"message": 1}, {"hints": "x"})),
    ],
)
def test_a_controller_that_answers_nonsense_is_refused(
    runs: RunsDir, frames: list[dict[str, Any]]
) -> None:
    made = make(runs, "H9")
    sent = b"".join(json.dumps({**each, "size": 0}).encode() + b"\n" for each in frames)
    pipe, written = Pipe(io.BytesIO(sent), io.BytesIO()), io.BytesIO()
    pipe._writer = written
    plan = dataclasses.replace(make_plan(runs.root.parent), hosts=("gpu1",))
    with pytest.raises(SubmissionError, match="the answer of gpu1 makes no sense"):
        backend._negotiate(pipe, plan, made.paths, lambda: None, last_id=9)
    assert b'"go"' not in written.getvalue()


def test_a_message_that_is_too_deep_ends_the_connection() -> None:
    assert Pipe(io.BytesIO(b"[" * 200_000), io.BytesIO()).receive() is None


def test_a_damaged_run_at_a_host_takes_no_other_along(runs: RunsDir) -> None:
    good, bad = make(runs, "L7"), make(runs, "L8")
    bad.paths.record.write_text("{")
    gone = str(runs.root / "demo" / "gone")
    found = json.loads(homes.answer([good.run_dir, bad.run_dir, gone]).removeprefix(homes.MARK))
    assert [each and each["record"]["job_id"] for each in found] == ["L7", None]
