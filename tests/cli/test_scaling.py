"""`scaling` on a pretended Slurm: what is queued, measured, printed and kept."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from clusterrun.cli import scaling as scaling_verb
from tests.cli.conftest import CommandLine, Said

# Ends at once as a job of N nodes that took `2 + N` seconds for each ten steps, the first slower.
SBATCH = """
import json, os, pathlib, re, sys
root = pathlib.Path(sys.argv[-1])
nodes = int(re.search(r"--nodes=(\\d+)", (root / "job.sbatch").read_text())[1])
number = sum(path.is_dir() for path in root.parent.iterdir())
refused, failed, silent, short = (os.environ.get(f"FAKE_{w}") == str(nodes)
    for w in ("REFUSED", "FAILED", "SILENT", "SHORT"))
if refused:
    sys.exit("sbatch: error: Batch job submission failed: Node count specification invalid")
(root / "events").mkdir()
(root / "attempts" / "1").mkdir(parents=True)
times = [0, 30] + [30 + n * (2 + nodes) for n in range(1, 2 if short else 12)]
lines = [json.dumps({"ts": t, "type": "step", "attempt": 1, "node": "n1", "step": 1 + 10 * i})
         for i, t in enumerate(times)]
if short:
    del lines[1:]
if not silent:
    (root / "events" / "n1.jsonl").write_text("\\n".join(lines) + "\\n")
state = "FAILED" if failed else os.environ.get("FAKE_STATE", "COMPLETED")
end = {"schema": "clusterrun.end/1", "state": state, "exit_code": int(failed), "ended_at": 1e9}
(root / "end.json").write_text(json.dumps(end))
print(100 + number)
"""


WORLDS = ("--nodes", "1,2,4", "--nproc-per-node", "2", "--device", "cpu")


@pytest.fixture(name="slurm")
def _slurm(here: CommandLine) -> CommandLine:
    program = here.bin / "sbatch.py"
    program.write_text(SBATCH)
    here.slurm(f'exec {sys.executable} -ES {program} "$@"')
    return here


def told(said: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.out)
    return found


def result_file(here: CommandLine) -> Path:
    return here.path / "runs" / "train-scaling" / "scaling.json"


def test_each_world_is_a_run_of_its_own_and_the_table_is_kept_for_plan(slurm: CommandLine) -> None:
    said = slurm("scaling", *WORLDS, "train.py", "--max-steps", "9")
    assert said.code == 0, said.err
    assert said.out == (
        "NODES  RANKS  STEP   STEPS/S  SPEED-UP  EFFICIENCY  COMMUNICATION  JOB\n"
        "1      2      0.3 s  3.333    1.00      100 %       0 %            101\n"
        "2      4      0.4 s  2.5      1.50      75 %        25 %           102\n"
        "4      8      0.6 s  1.667    2.00      50 %        50 %           103\n"
    )
    assert "Submitted batch job 102: 2 nodes x 2 ranks\n" in said.err
    assert "note: speed-up is relative to 2 ranks; each rank keeps its batch" in said.err
    kept = json.loads(result_file(slurm).read_text())
    assert kept["schema"] == "clusterrun.scaling/1"
    assert kept["script"] == str(slurm.path / "train.py")
    assert [point["job_id"] for point in kept["points"]] == ["101", "102", "103"]
    assert stat.S_IMODE(result_file(slurm).stat().st_mode) == 0o600
    (slurm.path / "clusterrun.yaml").write_text("script: train.py\ntraining: {params: 1000}\n")
    planned = slurm("plan", *WORLDS[2:], "-N", "4")
    assert "speed-up  2 times as fast as 2 ranks, efficiency 50 %: measured by" in planned.out
    assert told(slurm("plan", *WORLDS[2:], "-N", "2", "--json"))["speedup"]["low"] == 1.5
    assert "clusterrun scaling" not in slurm("plan", "-N", "2", "--device", "cpu").out


def test_a_fixed_batch_gains_by_steps(slurm: CommandLine) -> None:
    answer = told(slurm("scaling", *WORLDS, "--fixed-batch", "--json", "train.py"))
    assert [point["speedup"] for point in answer["points"]] == pytest.approx([1, 0.75, 0.5])
    assert answer["is_fixed_batch"] is True
    assert answer["failed"] == []


def test_a_world_that_fails_says_why_and_leaves_the_others(
    slurm: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILED", "2")
    said = slurm("scaling", *WORLDS, "train.py")
    assert said.code == 1
    assert "2      4      -      -        -         -           -              102\n" in said.out
    assert "4      8      0.6 s  1.667    2.00 " in said.out
    assert "warning: 2 nodes: job 102 is FAILED" in said.err
    monkeypatch.setenv("FAKE_FAILED", "1")
    answer = told(slurm("scaling", *WORLDS, "--json", "train.py"))
    assert [point["speedup"] for point in answer["points"]] == pytest.approx([1, 4 / 3])
    (failed,) = answer["failed"]
    assert (failed["nodes"], failed["job_id"]) == (1, "104")


def test_a_run_without_steps_names_the_call_that_reports_them(
    slurm: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SILENT", "4")
    monkeypatch.setenv("FAKE_SHORT", "2")
    said = slurm("scaling", *WORLDS, "train.py")
    assert said.code == 1
    assert "warning: 4 nodes: job 103 reported no steps: call clusterrun.runtime.step" in said.err
    assert "warning: 2 nodes: job 102 was too short to measure; train longer" in said.err
    assert not result_file(slurm).exists()  # one world shows no scaling


def test_a_refused_world_cancels_those_before_it(
    slurm: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_REFUSED", "4")
    said = slurm("scaling", *WORLDS, "train.py")
    assert said.code == 1
    assert "Node count specification invalid" in said.err
    assert {"101", "102"} <= set(slurm.asked("scancel"))


def test_ctrl_c_leaves_the_jobs_and_collect_comes_back(
    slurm: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scaling_verb, "wait", MagicMock(side_effect=KeyboardInterrupt))
        said = slurm("scaling", *WORLDS, "train.py")
    assert said.code == 130
    assert "run the same command with --collect to wait for them and print the table" in said.err
    assert slurm.asked("scancel") == []
    calls = len(slurm.asked("sbatch"))
    again = slurm("scaling", "--collect", *WORLDS, "train.py")
    assert again.code == 0, again.err
    assert [line.split()[-1] for line in again.out.splitlines()[1:]] == ["101", "102", "103"]
    assert len(slurm.asked("sbatch")) == calls
    more = slurm("scaling", "--collect", "--nodes", "1,8", *WORLDS[2:], "train.py")
    assert more.code == 1
    assert [line.split()[-1] for line in more.out.splitlines()[1:]] == ["101"]
    assert "warning: 8 nodes: no run with this script and arguments was found" in more.err
    assert "run the same command without --collect" in more.err
    other = slurm("scaling", "--collect", *WORLDS, "train.py", "--batch", "64")
    assert (other.code, other.err.count("no run with this script")) == (1, 3)


REFUSED = (
    *(
        (f"{nodes} train.py", "is not two or more node counts", "--nodes 1,2,4")
        for nodes in ("", "--nodes 4", "--nodes 0,1", "--nodes 1,x", "--nodes 1,2,2", "--nodes 2,1")
    ),
    ("--nodes 1,2 --strategy none train.py", "none runs one process", "ddp"),
    ("--nodes 1,65 train.py", "a job on more than 64 nodes needs confirmation", "pass -y"),
)


def test_what_cannot_be_meant_is_refused_before_anything_is_queued(slurm: CommandLine) -> None:
    said = {words: slurm("scaling", *words.split()) for words, _, _ in REFUSED}
    wrong = [
        (words, said[words])
        for words, *texts in REFUSED
        if said[words].code != 2 or not all(text in said[words].err for text in texts)
    ]
    assert wrong == []
    assert slurm.asked("sbatch") == []
