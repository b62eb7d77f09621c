"""Trainings as people write them, without a line of ours, show step, rate and time left."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest

from tests.patience import wait_for
from tests.road import SCRIPTS, Project

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300)]

TWO = ("--cluster", "local", "--nproc-per-node", "2", "--device", "cpu")
START_S = 120.0


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    for script in (SCRIPTS / "styles").glob("*.py"):
        shutil.copy(script, here.path)
    here.extra |= {"HF_HUB_OFFLINE": "1"}
    return here


def need(package: str) -> None:
    """Leave a test whose package is missing."""
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed: pip install '.[styles]'")


@pytest.mark.parametrize(
    ("script", "package", "source", "unit"),
    [
        ("plain_ddp.py", "tqdm", "output", "it"),
        ("accelerated.py", "accelerate", "output", "it"),
        ("trainer.py", "transformers", "reported", "steps"),
        ("sft.py", "trl", "reported", "steps"),
        ("lit.py", "lightning", "reported", "steps"),
    ],
)
def test_an_unchanged_script_shows_step_rate_and_time_left(
    here: Project, script: str, package: str, source: str, unit: str
) -> None:
    need(package)
    job_id = here.submit(*TWO, script)

    def estimated() -> dict[str, Any] | None:
        now = here.json("status", job_id)
        assert now["state"] in ("PENDING", "RUNNING"), here.logs(job_id)
        progress: dict[str, Any] = now["progress"]
        is_of_training = progress["source"] == source  # SFTTrainer tokenizes first, with a bar
        return progress if is_of_training and progress["eta_s"] and progress["step"] > 60 else None

    try:
        found = wait_for(estimated, f"an estimate for {script}", START_S)
        assert 60 < found["step"] < found["total"]
        left = found["total"] - found["step"]
        assert found["eta_s"] == pytest.approx(left / found["rate_per_s"], rel=0.01)
        text = here.ok("status", job_id)
        assert f" {unit}/s, " in text
        assert " to go" in text
        assert ("(from its output" in text) == (source == "output")
        assert ", DDP\n" in text
        assert f" {unit}/s, " in here.ok("list")
        # The callback leaves nothing in the checkpoints of the Trainer.
        states = list(here.path.glob("out/checkpoint-*/trainer_state.json"))
        assert bool(states) == (script == "trainer.py")
        assert not any("TrainerSteps" in state.read_text() for state in states)
    finally:
        here.ok("cancel", "-y", job_id)
