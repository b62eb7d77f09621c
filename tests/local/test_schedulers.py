"""A scheduler that a package adds in one file: the main road, and that nothing else knows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.config.choices import Scheduler
from tests.checkout import ROOT
from tests.patience import wait_for
from tests.road import LIGHT, Project, wait_for_none

FILE = Path(__file__).with_name("files_scheduler.py")
PAGE = (ROOT / "docs" / "plugins.md").read_text().partition("\n## A scheduler\n")[2]
TWO = ("--cluster", "files", "--nodes", "2", "--nproc-per-node", "2")


@pytest.fixture(name="there")
def a_project_with_a_queue(here: Project, tmp_path: Path) -> Project:
    """Install the scheduler beside clusterrun, as pip would."""
    packages, queue = tmp_path / "packages", tmp_path / "queue"
    info = packages / "files_scheduler-1.dist-info"
    info.mkdir(parents=True)
    queue.mkdir()
    shutil.copy(FILE, packages)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: files-scheduler\nVersion: 1\n")
    points = "files = files_scheduler:SCHEDULER\nbroken = files_scheduler:NOTHING\n"
    (info / "entry_points.txt").write_text(f"[clusterrun.schedulers]\n{points}")
    here.extra.update(PYTHONPATH=str(packages), FILES_QUEUE=str(queue))
    return here


@pytest.mark.agents
def test_a_scheduler_in_one_file_runs_the_main_road(there: Project, tmp_path: Path) -> None:
    light = (*LIGHT[:-1], f"{LIGHT[-1]}:{there.extra['PYTHONPATH']}")
    job_id = there.submit(*TWO, *light, "own_handler.py", "SIGTERM", "1", "0")
    status = there.json("status", job_id)
    assert (status["state"], status["backend"]) == ("PENDING", "files")
    argv = [sys.executable, str(tmp_path / "packages" / FILE.name), "serve"]
    with subprocess.Popen(argv, env={**there.environ, **there.extra}) as server:
        try:
            there.wait_for_line(job_id, "ready", 4)
            status = there.json("status", job_id)
            assert status["state"] == "RUNNING"
            assert status["nodes"] == 2
            there.ok("cancel", job_id)
            there.wait_for_line(job_id, "has saved", 4)
            wait_for_none(there, job_id)
            wait_for(lambda: there.json("status", job_id)["state"] == "CANCELLED", "the end")
            there.ok("resume", job_id, "--wait")
            assert there.logs(job_id).count("continues") == 4
            (run,) = there.json("list")["jobs"]
            assert (run["state"], run["job_id"]) == ("COMPLETED", "2")
        finally:
            server.kill()


def test_a_name_that_nothing_offers_and_a_broken_package_are_refused(there: Project) -> None:
    for name, said in {
        "nosuch": "unknown cluster 'nosuch'",
        "broken": "the scheduler 'broken' (files_scheduler:NOTHING) cannot be imported",
    }.items():
        done = there.cli("submit", "--cluster", name, "world.py")
        assert (done.returncode, f"error: {said}" in done.stderr) == (2, True), done.stderr


def test_a_scheduler_is_one_small_file_and_its_page_names_what_it_answers() -> None:
    assert len(FILE.read_text().splitlines()) <= 150
    assert len(PAGE.splitlines()) <= 80
    assert [name for name in Scheduler._fields if f"`{name}`" not in PAGE] == []
    shown = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown
    assert [block for block in shown if block not in FILE.read_text()] == []


def test_no_decision_rests_on_the_name_of_a_scheduler() -> None:
    named = re.compile(r"\bis (?:not )?Cluster\.(?!AUTO)|== Cluster\.|in \(Cluster\.")
    sources = [
        path for path in (ROOT / "clusterrun").rglob("*.py") if named.search(path.read_text())
    ]
    assert sources == []
