"""What trains is what was asked: on two nodes of two ranks, with the Trainer and with DeepSpeed.

So are parallel sizes: torch's own mesh, and Ulysses with DeepSpeed.
"""

from __future__ import annotations

import re

import pytest

from tests.local.test_main_road_local import FOUR
from tests.road import SCRIPTS, Project

# DeepSpeed's optimizer is compiled once on a machine, for a minute or more.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
JSON = "zero2_offload.json"


@pytest.fixture(name="here")
def _here(here: Project) -> Project:
    for config in SCRIPTS.glob("*.json"):
        (here.path / config.name).write_bytes(config.read_bytes())
    here.extra |= {"HF_HUB_OFFLINE": "1"}
    return here


@pytest.mark.long
def test_a_mesh_of_the_scripts_own_gets_the_size_that_was_asked_for(here: Project) -> None:
    argv = ("--set", "launch.tensor_parallel=4", "mesh.py")
    done = here.cli("submit", "--wait", *FOUR, *argv, timeout_s=500)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"rank [0-3] of tensor 4 loss ([0-9.]+)", here.logs("L1"))
    assert len(losses) == 4
    assert len(set(losses)) == 1  # the ranks share one model and its samples


@pytest.mark.long
def test_ulysses_splits_samples_and_its_batch_is_the_one_that_was_told(here: Project) -> None:
    argv = ("--strategy", "zero3", "--set", "launch.sequence_parallel=2", "ulysses.py")
    (here.path / "clusterrun.yaml").write_text("training: {micro_batch: 2}\n")
    done = here.cli("submit", "--wait", *FOUR, *argv, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert "  parallel   shard 2 x sequence 2; 2 data-parallel ranks\n" in done.stderr
    found = re.findall(r"rank (\d) batch (\d+) steps (\d+) of (\d+) tokens", here.logs("L1"))
    # 16 samples of 16 tokens: micro-batches of 2 in 2 data-parallel ranks, halves of each sample.
    assert sorted(found) == [(str(rank), "4", "4", "8") for rank in range(4)]
    assert here.json("status", "L1")["engine"] == "deepspeed"


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
