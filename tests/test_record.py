"""Runs are laid out whole, private and under safe names, and found again by any of their names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import ClusterrunError, JobNotFoundError, UsageError
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create, record
from clusterrun.rundir.paths import RunPaths, RunsDir, directory_name
from clusterrun.rundir.record import JobRecord
from tests.patience import patience

from .backends.builders import make_bundle, make_plan


@pytest.fixture
def runs(tmp_path: Path) -> RunsDir:
    return RunsDir(root=tmp_path / "runs")


def make(
    runs: RunsDir, name: str = "demo", run_id: str = "r1", job_id: str = "", at: float = 1.0
) -> JobRecord:
    """Make a run with its record, as a submission does."""
    plan = make_plan(runs.root.parent, name=name)
    paths = create.create_run(runs, name, run_id, make_bundle(plan))
    made = record.new_record(plan, paths, argv=["clusterrun", "submit"], now=at)
    made = dataclasses.replace(made, job_id=job_id)
    record.write(made)
    if job_id:
        record.link_job(paths, job_id)
    return made


def laid_out(runs: RunsDir, run_id: str) -> RunPaths:
    return create.create_run(runs, "demo", run_id, Bundle(files={"job.sbatch": ""}))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Laying out


def test_a_run_is_private_and_its_scripts_can_run(runs: RunsDir) -> None:
    os.umask(0)  # the worst case
    try:
        made = make(runs, job_id="7")
    finally:
        os.umask(0o022)
    root = made.paths.root
    assert root == runs.root / "demo" / "r1"
    assert {mode(path) for path in (runs.root, root.parent, root, root / "slurm")} == {0o700}
    files = {path.name: mode(path) for path in root.iterdir() if path.is_file()}
    assert files == {"job.sbatch": 0o700, "node.sh": 0o700, "plan.json": 0o600, "job.json": 0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another group")
@pytest.mark.parametrize("place", ["", "demo", "by-job"])
@pytest.mark.parametrize(
    ("group", "mode", "is_refused"),
    [(65534, 0o775, True), (65534, 0o1775, False), (0, 0o775, False), (0, 0o757, True)],
)
def test_a_directory_in_which_others_can_replace_a_run_is_refused(
    runs: RunsDir, place: str, group: int, mode: int, is_refused: bool
) -> None:
    shared = runs.root / place
    shared.mkdir(parents=True)
    shared.chmod(mode)
    os.chown(shared, -1, group)
    if not is_refused:
        assert laid_out(runs, "r1").script.exists()
        return
    with pytest.raises(UsageError, match="other users can write to") as refused:
        laid_out(runs, "r1")
    assert f"--run-dir {runs.root}/{record.current_user()}" in refused.value.hints[0]
    assert not any(path.is_file() for path in runs.root.rglob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("place", ["", "by-job"])
def test_a_colleagues_directory_is_named_before_anything_is_submitted(
    place: str, request: pytest.FixtureRequest
) -> None:
    top = tempfile.TemporaryDirectory()
    request.addfinalizer(top.cleanup)
    Path(top.name).chmod(0o755)
    runs = RunsDir(root=Path(top.name) / "runs")
    make(runs, job_id="7")
    runs.root.chmod(0o1777 if place else 0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=f"{runs.root / place}, which bel") as refused:
            create.create_run(runs, "other", "r1", Bundle(files={}))
        with pytest.raises(JobNotFoundError):
            record.resolve_job("7", [runs])
    finally:
        os.seteuid(0)
    own = f"{runs.root}/" if place else "~/clusterrun-runs"
    assert f"--run-dir {own}" in refused.value.hints[0]


def test_a_submission_that_is_refused_meanwhile_does_no_harm(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parents, calls = create._make_parents, count()

    def made(place: RunsDir, paths: RunPaths) -> None:
        make_parents(place, paths)
        if not next(calls):
            paths.root.parent.rmdir()  # as the other one does, which had made it

    monkeypatch.setattr(create, "_make_parents", made)
    assert create.create_run(runs, "demo", "r1", Bundle(files={})).slurm_dir.is_dir()


def test_removing_a_run_removes_what_was_made_for_it_and_no_empty_directory_else(
    runs: RunsDir,
) -> None:
    create.remove_run(laid_out(runs, "r1"))
    assert not runs.root.exists()
    (runs.root / "demo").mkdir(parents=True)
    runs.by_job.mkdir()
    create.remove_run(laid_out(runs, "r1"))
    assert sorted(path.name for path in runs.root.iterdir()) == ["by-job", "demo"]


@given(st.text(min_size=1, max_size=300))
def test_any_name_becomes_one_plain_directory(name: str) -> None:
    made = directory_name(name)
    assert made == Path(made).name != ""
    assert not made.startswith((".", "-"))
    assert made != "by-job"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", made)
    assert len(made) <= 80


def test_an_error_half_way_leaves_nothing(runs: RunsDir) -> None:
    bundle = Bundle(files={"node.sh": "ok", "no/such/dir/file": "fails"})
    with pytest.raises(ClusterrunError, match=f"{runs.root / 'demo' / 'r1'}"):
        create.create_run(runs, "demo", "r1", bundle)
    assert not runs.root.exists()


# job.json


def test_a_record_is_read_as_it_was_written(runs: RunsDir) -> None:
    made = make(runs, job_id="4711")
    assert record.read(made.paths) == made
    assert (made.nodes, made.world_size, made.strategy) == (2, 2, "ddp")
    assert made.versions["submitit"] >= "1.5"
    data = json.loads(made.paths.record.read_text())
    assert data["schema"] == "clusterrun.job/1"
    made.paths.record.write_text(json.dumps({**data, "run_id": "other", "from_the_future": 1}))
    assert record.read(made.paths) == made


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "clusterrun.job/2"}', '{"schema": "clusterrun.job/1"}']
)
def test_a_damaged_record_is_an_error_alone_and_passed_over_in_a_list(
    runs: RunsDir, text: str
) -> None:
    good, bad = make(runs, run_id="good"), make(runs, run_id="bad")
    bad.paths.record.write_text(text)
    with pytest.raises(ClusterrunError, match="cannot read"):
        record.read(bad.paths)
    assert record.list_records(runs) == [good]
    os.utime(bad.paths.record, (9e9, 9e9))
    for word in (None, "bad", "demo/bad", str(bad.paths.root)):  # it does not mean an older run
        with pytest.raises(ClusterrunError, match="cannot read"):
            record.resolve_job(word, [runs])


# Finding


NAMES = """4711 4711_3 4711+1 4711.batch 4711;tux demo r1 demo/r1 {runs}/demo/r1
    {runs}/by-job/4711 {runs}/demo/r1/plan.json {runs}/demo/r1/slurm"""


def test_a_run_is_found_by_each_of_its_names(runs: RunsDir) -> None:
    made = make(runs, job_id="4711")
    record.write(dataclasses.replace(made, slurm_cluster="tux"))
    make(runs, name="demo-4711", run_id="r9", job_id="9", at=5)
    for text in NAMES.format(runs=runs.root).split():
        assert record.resolve_job(text, [runs]).run_dir == str(made.paths.root), text


def test_a_name_means_the_newest_of_its_runs_and_nothing_the_newest_of_all(runs: RunsDir) -> None:
    make(runs, run_id="b", job_id="1", at=10)
    make(runs, run_id="a", job_id="2", at=20)
    make(runs, name="other", run_id="c", job_id="3", at=30)
    assert record.resolve_job("demo", [runs]).job_id == "2"
    assert record.resolve_job(None, [runs]).job_id == "3"
    assert [found.job_id for found in record.list_records(runs)] == ["3", "2", "1"]


def test_the_newest_records_are_found_without_reading_the_old_ones(
    runs: RunsDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for number in range(20):
        at = now - 86400 * number
        made = make(runs, f"name{number % 3}", f"r{number}", job_id=str(number), at=at)
        os.utime(made.paths.record, (at + 1, at + 1))
    record.write(dataclasses.replace(record.list_records(runs)[-1], resumed_at=now + 1))
    read = record.read
    opened: list[RunPaths] = []
    monkeypatch.setattr(record, "read", lambda paths: opened.append(paths) or read(paths))
    assert [found.job_id for found in record.list_records(runs, 3)] == ["19", "0", "1"]
    assert len(opened) <= 4
    assert record.resolve_job("name2", [runs]).job_id == "2"
    assert len(opened) <= 6


def test_a_job_that_checks_nodes_is_not_the_newest(runs: RunsDir) -> None:
    training = make(runs, run_id="r1", job_id="1", at=1.0)
    smoke = dataclasses.replace(make(runs, "doctor", "r2", job_id="2", at=2.0), is_smoke=True)
    record.write(smoke)
    assert record.resolve_job(None, [runs]) == training
    assert record.resolve_job("doctor", [runs]) == record.resolve_job("2", [runs]) == smoke


def test_an_id_that_two_other_projects_have_is_not_guessed(runs: RunsDir, tmp_path: Path) -> None:
    one, other = RunsDir(root=tmp_path / "one" / "runs"), RunsDir(root=tmp_path / "two" / "runs")
    for place in (one, other):
        place.root.parent.mkdir()
        make(place, job_id="L1")
    with pytest.raises(JobNotFoundError, match="no run yet"):
        record.resolve_job(None, [runs, one])
    with pytest.raises(UsageError) as raised:
        record.resolve_job("L1", [runs, one, other])
    assert raised.value.message == f"2 jobs have the id L1, but none of them is in {runs.root}"
    assert [str(one.root) in raised.value.hints[0], len(raised.value.hints)] == [True, 2]
    assert record.resolve_job("L1", [runs, one]).run_dir.startswith(str(one.root))


def test_two_clusters_may_use_the_same_id(runs: RunsDir) -> None:
    for cluster, run_id in (("tuxA", "a"), ("tuxB", "b")):
        made = make(runs, run_id=run_id, job_id="7")
        record.write(dataclasses.replace(made, slurm_cluster=cluster))
    assert record.resolve_job("7;tuxA", [runs]).run_id == "a"
    assert record.resolve_job("7;tuxB", [runs]).run_id == "b"
    with pytest.raises(JobNotFoundError):
        record.resolve_job("7;tuxC", [runs])


@pytest.mark.parametrize("text", ["..", "7/..", "L\u00b2", "L", "9" * 16, "7_1_2", "7\n", "-7", 7])
def test_what_is_no_id_names_no_link_and_no_job(runs: RunsDir, text: Any) -> None:
    made = make(runs, job_id="7")
    (runs.by_job / ("9" * 200)).symlink_to("../demo/r1")
    with pytest.raises(ValueError, match="job id"):
        record.link_job(made.paths, text)
    data = json.loads(made.paths.record.read_text())
    assert record.list_records(runs) == [made]
    made.paths.record.write_text(json.dumps({**data, "earlier_job_ids": ["6_2", text]}))
    with pytest.raises(ClusterrunError, match="cannot read"):
        record.read(made.paths)


@pytest.mark.parametrize(
    "text", ["47111", "", "L", "../..", "\x00", "no such", "7; rm -rf /", "*", "a" * 9999]
)
def test_an_unknown_job_names_the_newest_runs(runs: RunsDir, text: str) -> None:
    make(runs, name="llama3", job_id="4711")
    with pytest.raises(JobNotFoundError) as unknown:
        record.resolve_job(text, [runs])
    assert unknown.value.exit_code == 4
    assert unknown.value.hints == ("choose a run; the newest are: 4711 (llama3)",)


def test_a_directory_of_the_name_of_a_run_does_not_hide_it(
    runs: RunsDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(runs, name="demo", job_id="7")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert record.resolve_job("demo", [runs]).job_id == "7"


# Runs that came otherwise


def test_a_job_that_goes_on_with_a_run_becomes_its_newest(runs: RunsDir) -> None:
    made = make(runs)
    record.register_run(made.paths.root, {"SLURM_JOB_ID": "53"})
    for job_id in ("54", "53"):
        last = record.register_run(made.paths.root, {"SLURM_JOB_ID": job_id})
    assert (last.job_id, last.earlier_job_ids) == ("54", ("53",))


def test_places_are_remembered_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs_dirs = [RunsDir(root=tmp_path / name) for name in ("a", "b", "gone")]
    for place in runs_dirs:
        place.root.mkdir()
        record.remember_root(place)
    record.remember_root(runs_dirs[0])
    runs_dirs[2].root.rmdir()
    assert record.remembered_roots() == runs_dirs[:2]
    assert mode(tmp_path / "state" / "clusterrun" / "roots.json") == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"roots": 5}', '{"roots": [1]}'])
def test_a_damaged_memory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "clusterrun" / "roots.json"
    file.parent.mkdir()
    file.write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert record.remembered_roots() == []
    record.remember_root(RunsDir(root=tmp_path))
    assert record.remembered_roots() == [RunsDir(root=tmp_path)]


def test_a_path_stays_spelled_as_the_user_spells_it(runs: RunsDir, tmp_path: Path) -> None:
    make(runs, job_id="7")
    (tmp_path / "home").symlink_to(runs.root)  # as /home/me is on many clusters
    home = RunsDir(root=tmp_path / "home")
    for text in ("7", "demo", f"{home.root}/by-job/7", f"{home.root}/demo/r1/slurm"):
        assert record.resolve_job(text, [home]).run_dir == f"{home.root}/demo/r1"


def test_a_change_of_the_record_waits_for_the_one_before(runs: RunsDir) -> None:
    """The job registers itself while a slow `submit --chain` writes down its later jobs."""
    made = make(runs, job_id="52")
    begun, may_end = threading.Event(), threading.Event()

    def slowly(now: JobRecord) -> JobRecord:
        begun.set()
        may_end.wait(30 * patience())
        return record.chained_by(now, "60")

    chaining = threading.Thread(target=record.update, args=(made.paths, slowly))
    chaining.start()
    assert begun.wait(30 * patience())
    going_on = threading.Thread(
        target=record.update, args=(made.paths, lambda now: record.continued_by(now, "53"))
    )
    going_on.start()
    going_on.join(0.3 * patience())
    may_end.set()
    for thread in (chaining, going_on):
        thread.join(30 * patience())
    now = record.read(made.paths)
    assert (now.earlier_job_ids, now.job_id) == (("52", "60"), "53")


def test_a_job_that_recorded_itself_first_is_not_recorded_twice(runs: RunsDir) -> None:
    gone_on = record.continued_by(make(runs, job_id="52"), "53")
    assert record.submitted_as(gone_on, "52", None) == gone_on
    assert record.chained_by(gone_on, "53") == gone_on
