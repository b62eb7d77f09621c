"""What trains is what was asked: on two nodes of two ranks, with the Trainer and with DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.test_main_road_local import FOUR
from tests.road import SCRIPTS, Project, project

# DeepSpeed's optimizer is compiled once on a machine, for a minute or more.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
JSON = "zero2_offload.json"


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    made = project(tmp_path / "project", tmp_path / "state")
    for config in SCRIPTS.glob("*.json"):
        (made.path / config.name).write_bytes(config.read_bytes())
    made.extra |= {"HF_HUB_OFFLINE": "1"}
    return made


def test_a_json_that_only_the_python_code_names_is_no_silent_ddp_on_a_cpu(here: Project) -> None:
    done = here.cli("submit", "--wait", *FOUR, "hf_trainer.py", "--hidden", JSON, timeout_s=500)
    assert done.returncode == 120, done.stderr
    status = here.json("status", "L1")
    assert (status["state"], status["exit"]["code"]) == ("FAILED", 120)
    assert [attempt["cause"] for attempt in status["attempts"]] == ["engine"]
    said = status["verdict"]["message"]
    assert "the script itself requested DeepSpeed, but plain DDP would train instead" in said
    assert "clusterrun submit --deepspeed-config FILE" in said
    assert "trained" not in here.logs("L1")


@pytest.mark.long
@pytest.mark.parametrize("beside", [(), ("--strategy", "zero2-offload")])
def test_a_trainer_with_its_own_json_trains_with_deepspeed(
    here: Project, beside: tuple[str, ...]
) -> None:
    argv = (*FOUR, *beside, "hf_trainer.py", "--deepspeed", JSON)
    done = here.cli("submit", "--wait", *argv, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert f"{JSON}, from the script's arguments, sets the strategy to zero2-offload" in done.stderr
    text = here.logs("L1")
    for rank in range(4):
        assert f"rank {rank} trained 2 steps with DeepSpeedEngine" in text
        assert f"rank {rank} of 4 stepped DeepSpeedZeroOptimizer on cpu" in text
    assert here.json("status", "L1")["engine"] == "deepspeed"
    assert "2 nodes x 2 ranks, DeepSpeed\n" in here.ok("status", "L1")


@pytest.mark.long
def test_the_way_out_that_the_message_names_trains_with_deepspeed(here: Project) -> None:
    argv = ("--deepspeed-config", JSON, "hf_trainer.py", "--hidden", JSON)
    done = here.cli("submit", "--wait", *FOUR, *argv, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert here.logs("L1").count("trained 2 steps with DeepSpeedEngine") == 4
