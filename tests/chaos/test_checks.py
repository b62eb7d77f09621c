"""The checks of the chaos suite see what they are there for: each is shown a run that is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.checks import Reference, problems
from tests.chaos.faults import Fault
from tests.chaos.training import Training
from tests.road import Project

STEPS = 6
FINAL = {"model.safetensors": b"weights", "optimizer.bin": b"moments"}
REFERENCE = Reference(final=FINAL, losses={step: f"{9 - step}.000" for step in range(1, STEPS + 1)})


def fault(**what: Any) -> Fault:
    return Fault("made up", lambda scene: 0.0, **{"attempts": None, **what})


def run(root: Path, *attempts: Sequence[int], saved: Sequence[Sequence[int]]) -> Training:
    """Write what a run leaves behind: the steps and the checkpoints of each attempt."""
    events = []
    for number, steps in enumerate(attempts, start=1):
        (root / "attempts" / str(number)).mkdir(parents=True)
        log = root / "logs" / f"a{number}" / "node1.log"
        log.parent.mkdir(parents=True)
        lines = [f"{10**15 + s} 0 o step {s}/6 loss {REFERENCE.losses[s]} lr 1\n" for s in steps]
        log.write_text("".join(lines))
        for step in saved[number - 1]:
            events.append({"ts": 1.0, "type": "checkpoint", "attempt": number, "step": step})
    (root / "events").mkdir()
    (root / "events" / "node1.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (root / "job.json").write_text('{"job_id": "1"}')
    last = root / "checkpoints" / "step-00000006"
    last.mkdir(parents=True)
    for name, data in {**FINAL, ".complete": b"{}"}.items():
        (last / name).write_bytes(data)
    here = Project(path=root, environ={})
    return Training(project=here, root=root, steps=STEPS)


def said(training: Training, hurt: Fault, state: str = "COMPLETED") -> str:
    return "\n".join(problems(training, REFERENCE, hurt, state))


def test_each_thing_that_is_wrong_with_a_run_is_said(tmp_path: Path) -> None:
    """A run was hurt after step 3 and went on from checkpoint 2."""
    good = run(tmp_path / "run", [1, 2, 3], [3, 4, 5, 6], saved=[[2], [4, 6]])
    assert said(good, fault(attempts=2)) == ""
    assert said(good, fault(), "FAILED") == "the run is FAILED, not COMPLETED"
    assert said(good, fault(attempts=1)) == "it took 2 attempts, not 1"
    assert said(good, fault(warned=True)) == "attempt 2 began with step 3, not with 4"
    log = good.root / "logs" / "a2" / "node1.log"
    log.write_text(log.read_text().replace("loss 5.000", "loss 5.001"))
    assert "has not the loss 5.000" in said(good, fault())
    last = good.root / "checkpoints" / "step-00000006"
    (last / "optimizer.bin").write_bytes(b"momenta")
    assert "optimizer.bin of the last checkpoint is not that" in said(good, fault())
    (good.root / "attempts" / "1" / "outcome.json").write_text("{")
    assert "can't be read: attempts/1/outcome.json" in said(good, fault())


def test_steps_that_are_missed_repeated_or_not_saved_are_seen(tmp_path: Path) -> None:
    text = said(run(tmp_path / "run", [1, 2], [4, 5, 6], saved=[[2], [4, 6]]), fault())
    assert "never trained: steps [3]" in text
    assert "attempt 2 began with step 4, not with 3" in text
    again = run(tmp_path / "again", [1, 2, 3, 4, 5], [3, 4, 5, 6], saved=[[2, 4], [6]])
    assert said(again, fault()) == "attempt 2 began with step 3, not with 5"
    assert said(again, fault(unusable=1)) == ""
    left = run(tmp_path / "left", [1, 2, 3], saved=[[2]])
    text = said(left, fault(warned=True, state="CANCELLED"), "CANCELLED")
    assert text == "the last step is 3, the last checkpoint 2"


def test_only_a_dead_node_loses_the_line_of_a_step_that_it_saved(tmp_path: Path) -> None:
    training = run(tmp_path / "run", [1], [3, 4, 5, 6], saved=[[2], [4, 6]])
    for cause, complaint in (("node_lost", ""), ("signal", "never trained: steps [2]")):
        (training.root / "attempts" / "1" / "outcome.json").write_text(f'{{"cause": "{cause}"}}')
        assert said(training, fault()) == complaint
