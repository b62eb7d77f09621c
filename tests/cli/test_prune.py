"""`prune`: which runs are removed, which are kept, and what is left of them."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from clusterrun.cli import cancel
from clusterrun.cli.shared import output
from clusterrun.rundir import record as records
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import Home
from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, queue, running, submitted

REQUEUED = "5|PENDING||0:00|1:00:00|N/A|N/A|||BeginTime"


def over(here: CommandLine, job_id: str, state: str = "FAILED", days: float = 0) -> Path:
    root = submitted(here, job_id, "-J", f"run{job_id}", "train.py")
    ended(root, state, 1, at=time.time() - days * 86400)
    return root


def ids(here: CommandLine) -> list[str]:
    return sorted(here("list", "--all", "--ids-only").out.split())


def test_old_runs_go_with_their_links_and_all_else_stays(here: CommandLine) -> None:
    gone, complete, resumable = over(here, "1"), over(here, "2", "COMPLETED"), over(here, "3")
    saved = over(here, "8", "COMPLETED")
    for root in (saved, resumable):
        (root / "checkpoints/step-00000005").mkdir(parents=True)
    queue(here, running("4"), REQUEUED, running("7"))
    kept = [submitted(here, "4"), over(here, "5"), submitted(here, "6"), over(here, "7")]
    (gone / "weights").symlink_to(here.path / "train.py")
    refused = here("prune")
    assert refused.code == 2
    assert refused.err.endswith("  hint: pass -y to remove without confirmation\n")
    listed, said = here("prune", "--dry-run"), here("prune", "-y")
    assert said.out == listed.out.replace("would remove", "removed")
    rows = [line.split() for line in said.out.splitlines()]
    assert [(row[0], row[2], row[-3]) for row in rows[1:-1]] == [
        *(("2", "COMPLETED", "-"), ("1", "FAILED", "-")),
    ]
    assert rows[-1][:3] == ["removed", "2", "runs,"]
    assert said.err == (
        "note: kept 4 runs (perhaps active): see clusterrun list; "
        "if the run has ended, remove the directory by hand\n"
        "note: kept 2 runs (with checkpoints): pass --all to remove such runs too\n"
    )
    assert ids(here) == sorted(os.listdir("runs/by-job")) == ["3", "4", "5", "6", "7", "8"]
    assert all(root.is_dir() for root in (*kept, saved, resumable))
    assert not [root for root in (gone, complete) if root.parent.exists()]
    assert (here.path / "train.py").exists()


def test_only_what_ended_long_ago_or_is_named(here: CommandLine) -> None:
    for job_id, days in (("1", 40), ("2", 20), ("3", 0)):
        over(here, job_id, days=days)
    assert here("prune", "-y", "--older-than", "30d").code == 0
    for wrong in (("30",), ("30d", "2")):  # seconds are not meant; a run that is named is too young
        assert here("prune", "-y", "--older-than", *wrong).code == 2
    assert ids(here) == ["2", "3"]
    (RunPaths(root=Path("runs/by-job/3").resolve()).checkpoints_dir / "x").mkdir(parents=True)
    said = here("prune", "-y", "2", "3")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: job 3 (run3, FAILED) is kept (with checkpoints)\n")
    assert ids(here) == ["2", "3"]
    assert here("prune", "-y", "--all", "2", "3").code == 0
    assert (ids(here), here("prune").out) == ([], "no old runs\n")


@pytest.mark.parametrize("case", ["link", "owner", "elsewhere", "host", "silent", "aside"])
def test_no_run_of_others_is_removed(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    root = over(here, "1")
    if case == "link":
        root.rename("moved")
        root.symlink_to(here.path / "moved")
    elif case == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    elif case == "host":
        home = Home(host="h1", run_dir="/runs", python="python3")
        records.update(RunPaths(root=root), lambda old: dataclasses.replace(old, home=home))
    elif case == "aside":
        Path("theirs").mkdir()
        Path(f"runs/.removed-{os.getuid()}").symlink_to(here.path / "theirs")
    elif case == "silent":
        here.program("squeue", "exit 1")
    else:
        Path("other").mkdir()
        monkeypatch.chdir("other")
    said = here("prune", "-y", *(["1"] if case == "elsewhere" else []))
    codes = {"elsewhere": 2, "silent": 5, "aside": 1}
    assert (said.code, root.is_dir()) == (codes.get(case, 0), True)
    assert ("by hand" in said.err) == (case in ("link", "owner", "elsewhere", "host"))


def test_a_removal_asks_and_is_finished_by_the_next(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(here, "5")
    with monkeypatch.context() as patch:
        patch.setattr(output, "is_interactive", lambda: True)
        patch.setattr("click.confirm", lambda *_, **__: False)
        assert (here("prune").code, ids(here)) == (1, ["5"])
        patch.setattr("click.confirm", lambda *_, **__: queue(here, REQUEUED) or True)
        assert (here("prune").code, ids(here)) == (2, ["5"])  # requeued during the question
        queue(here)
        patch.setattr(cancel, "_disk_bytes", lambda _: queue(here, REQUEUED) or 0)
        assert (here("prune", "-y").code, ids(here)) == (2, ["5"])
        patch.setattr(cancel, "_disk_bytes", lambda _: 0)
        queue(here)
        patch.setattr("click.confirm", lambda *_, **__: True)
        patch.setattr("shutil.rmtree", lambda _: os.unlink("/proc/none"))
        said = here("prune")
    assert (said.code, said.err[:23]) == (1, "error: not all runs wer")
    assert (ids(here), here("prune").out) == ([], "no old runs\n")
    assert here.files() == ["runs", "runs/by-job", "train.py"]
