"""What a script's own arguments ask of the launch: adopted, or refused before it is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterrun.config.choices import Device, Strategy
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.plan import Plan, Precision
from clusterrun.launch.script_args import named_json
from clusterrun.launch.user_files import is_for_deepspeed
from tests.launch.samples import ZERO2_OFFLOAD, on_slurm, slurm_facts, variables

STEPS = "gradient_accumulation_steps"
TRAINER = ("--bf16", "--deepspeed", "ds.json", "--lr", "1e-4")


def adopting(config: dict[str, Any], args: tuple[str, ...] = TRAINER, **asked: Any) -> Plan:
    facts = {"script_deepspeed_text": json.dumps(config), **asked.pop("facts", {})}
    return on_slurm(slurm_facts(**facts), **{"args": args, "nodes": 2, "gpus_per_node": 4, **asked})


def test_the_json_that_arguments_name_is_found() -> None:
    found = {
        "--deepspeed ds.json": "ds.json",
        "--deepspeed=conf/ds.JSON --lr 1": "conf/ds.JSON",
        "--deepspeed --deepspeed_config ds.json": "ds.json",
        "--deepspeed_config=ds.json": "ds.json",
        **dict.fromkeys(("--deepspeed", "--deepspeed --config ds.json", "--deepspeed zero2")),
        **dict.fromkeys(("ds.json", "--deepspeedy ds.json")),
    }
    assert {words: named_json(words.split()) for words in found} == found


def test_another_file_is_no_configuration_of_deepspeed() -> None:
    texts = ("", "{", "[]", "{}", '{"zero_optimization": 2}', '"zero"')
    assert [text for text in texts if is_for_deepspeed(text)] == []


def test_the_scripts_json_is_adopted_and_said_so() -> None:
    plan = adopting(ZERO2_OFFLOAD)
    assert (plan.strategy, plan.precision) == (Strategy.ZERO2_OFFLOAD, Precision.HEAD)
    assert json.loads(plan.deepspeed) == ZERO2_OFFLOAD
    # Beside a JSON accelerate refuses a strategy's own settings.
    assert plan.accelerate_config == "deepspeed-config.yaml.j2"
    said = "ds.json, from the script's arguments, sets the strategy to zero2-offload"
    assert plan.notes.count(said) == 1
    assert plan.entry == ("train.py", *TRAINER)


def test_a_json_that_is_not_adopted_is_said_so() -> None:
    note = "ds.json, from the script's arguments, does not set the strategy: it is not plain JSON"
    plan = on_slurm(slurm_facts(), args=TRAINER, gpus_per_node=4)
    assert len([each for each in plan.notes if each.startswith(note)]) == 1
    assert not [each for each in adopting(ZERO2_OFFLOAD).notes if "does not set" in each]
    launch = {"deepspeed_config": "own.json", "facts": {"script_deepspeed_text": ""}}
    launch["facts"]["deepspeed_config_text"] = json.dumps(ZERO2_OFFLOAD)
    assert not [each for each in adopting(ZERO2_OFFLOAD, **launch).notes if "does not set" in each]


def test_on_a_cpu_deepspeed_really_runs() -> None:
    plan = adopting(ZERO2_OFFLOAD, device=Device.CPU)
    env = variables(plan)
    assert "ACCELERATE_USE_CPU" not in env  # it would make it DDP
    assert env["DS_ACCELERATOR"] == "cpu"
    assert plan.accelerate["use_cpu"] is False


def test_a_strategy_of_the_same_family_gives_way_to_the_json() -> None:
    for same in (Strategy.ZERO2, Strategy.ZERO2_OFFLOAD, Strategy.DDP):
        assert adopting(ZERO2_OFFLOAD, strategy=same) == adopting(ZERO2_OFFLOAD)
    for other in (Strategy.ZERO3, Strategy.FSDP):
        with pytest.raises(UsageError, match=r"but ds\.json means zero2-offload") as refused:
            adopting(ZERO2_OFFLOAD, strategy=other)
        assert refused.value.hints == ("drop --strategy: your own file decides",)


def test_a_file_of_the_launch_may_be_the_same_but_not_another() -> None:
    same = {
        "deepspeed_config": "own.json",
        "facts": {"deepspeed_config_text": json.dumps(ZERO2_OFFLOAD)},
    }
    plan = adopting(ZERO2_OFFLOAD, **same)
    assert plan.strategy is Strategy.ZERO2_OFFLOAD
    assert "sets the strategy" not in " ".join(plan.notes)  # the command line gave it
    other = {"deepspeed_config_text": '{"zero_optimization": {"stage": 3}}'}
    with pytest.raises(UsageError, match=r"two DeepSpeed configurations: own\.json \(launch"):
        adopting(ZERO2_OFFLOAD, deepspeed_config="own.json", facts=other)


def test_a_yaml_of_another_family_is_refused() -> None:
    yaml = {"accelerate_config_text": "distributed_type: MULTI_GPU"}
    with pytest.raises(UsageError, match=r"ds\.json is for DeepSpeed, but acc\.yaml has"):
        adopting(ZERO2_OFFLOAD, accelerate_config="acc.yaml", facts=yaml)


def test_batch_numbers_of_a_json_must_multiply() -> None:
    """Of 8 ranks; a script or a JSON that divides the model has fewer to a batch."""

    def said(*numbers: int | str | None, args: tuple[str, ...] = TRAINER, **more: int) -> str:
        names = ("batch_size", "micro_batch_size_per_gpu")
        given = dict(zip((*(f"train_{n}" for n in names), STEPS), numbers, strict=True))
        try:
            adopting({**ZERO2_OFFLOAD, **{n: v for n, v in given.items() if v}, **more}, args=args)
        except ConfigError as refused:
            return f"{refused.where}: {refused}".removeprefix("ds.json: train_batch_size ")
        return ""

    tensor = ("--tensor-model-parallel-size", "2", *TRAINER)
    wrong = [said(64, 4, 1), said(36, 4, None), said(8, None, 2), said(12, None, None)]
    assert [text.split(" (")[0] for text in wrong] == [
        *("64 is not 4", "36 is not a multiple of 4", "8 is not a multiple of 2"),
        "12 is not a multiple of 8 ranks",
    ]
    right = [said(64, 4, 2), said(32, 4, None), said(16, "auto", 2), said(None, 3, 5)]
    assert {*right, said(16, 4, 1, args=tensor), said(4, 4, 1, sequence_parallel_size=8)} == {""}


def test_a_trainers_fsdp_is_left_to_it() -> None:
    args = ("--fsdp", "full_shard auto_wrap", "--fsdp_config", "f.json")
    plan = on_slurm(args=args, gpus_per_node=4)
    assert plan == on_slurm(args=args, gpus_per_node=4, strategy=Strategy.DDP)
