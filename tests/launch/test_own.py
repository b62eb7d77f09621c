"""The user's own accelerate YAML and DeepSpeed JSON: taken as they are, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterrun.config.spec import Device, MixedPrecision, Strategy
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.plan import Plan, Precision
from tests.launch.samples import lines, on_slurm, slurm_facts, variables


def with_yaml(text: str, **asked: Any) -> Plan:
    return on_slurm(
        slurm_facts(accelerate_config_text=text),
        **{"accelerate_config": "acc.yaml", "gpus_per_node": 4, **asked},
    )


def with_json(config: object, **asked: Any) -> Plan:
    text = config if isinstance(config, str) else json.dumps(config)
    return on_slurm(
        slurm_facts(deepspeed_config_text=text),
        **{"deepspeed_config": "ds.json", "gpus_per_node": 4, **asked},
    )


ZERO2 = {"zero_optimization": {"stage": 2}}


def test_a_yaml_is_taken_as_it_is() -> None:
    text = "# mine\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 99\n"
    plan = with_yaml(text)
    assert plan.accelerate_text == text
    assert (plan.accelerate_config, plan.accelerate) == ("", {})
    assert (plan.strategy, plan.precision) == (Strategy.FSDP, Precision.FILE)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("distributed_type: MULTI_GPU", Strategy.DDP),
        ("distributed_type: FSDP", Strategy.FSDP),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}", Strategy.FSDP_OFFLOAD),
        ("distributed_type: DEEPSPEED", Strategy.ZERO2),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", Strategy.ZERO3),
        (
            "distributed_type: DEEPSPEED\n"
            "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}",
            Strategy.ZERO2_OFFLOAD,
        ),
    ],
)
def test_the_yaml_decides_the_strategy(text: str, strategy: Strategy) -> None:
    assert with_yaml(text).strategy is strategy


@pytest.mark.parametrize("key", ["fsdp_config", "deepspeed_config"])
def test_a_section_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} must be a section of settings, not \['x'\]"):
        with_yaml(f"distributed_type: {key.split('_')[0].upper()}\n{key}: [x]")


def test_a_bare_no_is_false_in_yaml_and_still_understood() -> None:
    plan = with_yaml("distributed_type: NO\nmixed_precision: no\n", gpus_per_node=1)
    assert (plan.strategy, plan.precision) == (Strategy.NONE, Precision.NO)


def test_a_flag_beats_the_precision_of_the_yaml_and_auto_leaves_it() -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
    assert with_yaml(text).precision is Precision.FILE
    assert with_yaml(text, mixed_precision=MixedPrecision.BF16).precision is Precision.BF16


def test_use_cpu_of_the_yaml_chooses_the_device() -> None:
    plan = with_yaml("distributed_type: MULTI_GPU\nuse_cpu: true\n")
    assert plan.device is Device.CPU
    assert variables(plan)["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("- a", "has no distributed_type"),
        ("", "has no distributed_type"),
        ("num_processes: 2", "has no distributed_type"),
        ("distributed_type: MULTI_CPU", "MULTI_CPU cannot be launched"),
        ("distributed_type: MEGATRON_LM", "MEGATRON_LM cannot be launched"),
        ("distributed_type: NO\ncompute_environment: AMAZON_SAGEMAKER", "cannot run here"),
    ],
)
def test_an_unusable_yaml_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        with_yaml(text)
    assert refused.value.where == "acc.yaml"


def test_dos_line_ends_become_unix_ones_for_sbatch_refuses_them() -> None:
    assert with_yaml("distributed_type: MULTI_GPU\r\n").accelerate_text.count("\r") == 0
    assert with_json('{"zero_optimization": {}}\r\n').deepspeed == '{"zero_optimization": {}}\n'


def test_a_json_is_taken_as_it_is_and_is_a_launch_of_deepspeed() -> None:
    text = '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},\n "x": "auto"}'
    plan = with_json(text)
    assert plan.deepspeed == text + "\n"
    assert plan.accelerate_config == "deepspeed-config.yaml.j2"
    assert plan.strategy is Strategy.ZERO2_OFFLOAD


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 0}, Strategy.ZERO1),
        ({"stage": 1}, Strategy.ZERO1),
        ({"stage": "auto"}, Strategy.ZERO2),
        ({}, Strategy.ZERO2),
        ({"stage": 3}, Strategy.ZERO3),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, Strategy.ZERO3_OFFLOAD),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, Strategy.ZERO2),
    ],
)
def test_the_json_decides_the_strategy(zero: dict[str, Any], strategy: Strategy) -> None:
    assert with_json({"zero_optimization": zero}).strategy is strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no zero_optimization section"),
        ("{}", "no zero_optimization section"),
        ('{"zero_optimization": 2}', "no zero_optimization section"),
    ],
)
def test_an_unusable_json_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        with_json(text)
    assert (refused.value.where or "").startswith("ds.json")
    if text == "{}":
        section = '"zero_optimization": {"stage": 0}'
        assert refused.value.hints[0].startswith(f"add {section}"), "DeepSpeed's own default"
        assert with_json(f"{{{section}}}").strategy is Strategy.ZERO1


ON, OFF, AUTO = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}


@pytest.mark.parametrize(
    ("sections", "on_gpu", "on_cpu"),
    [
        ({}, Precision.HEAD, Precision.NO),
        ({"fp16": AUTO, "bf16": AUTO}, Precision.HEAD, Precision.NO),
        ({"bf16": AUTO}, Precision.HEAD, Precision.NO),
        ({"bf16": ON}, Precision.BF16, Precision.BF16),
        ({"bfloat16": ON}, Precision.BF16, Precision.BF16),
        ({"fp16": ON}, Precision.FP16, None),
        ({"fp16": OFF}, Precision.NO, Precision.NO),
        ({"fp16": OFF, "bf16": OFF}, Precision.NO, Precision.NO),
        ({"fp16": AUTO, "bf16": OFF}, Precision.FP16, Precision.NO),
        ({"fp16": OFF, "bf16": AUTO}, Precision.BF16, Precision.NO),
    ],
)
def test_auto_precision_follows_the_json(
    sections: dict[str, Any], on_gpu: Precision, on_cpu: Precision | None
) -> None:
    assert with_json({**ZERO2, **sections}).precision is on_gpu
    if on_cpu is None:
        with pytest.raises(UsageError, match="fp16 needs a GPU"):
            with_json({**ZERO2, **sections}, device=Device.CPU)
    else:
        assert with_json({**ZERO2, **sections}, device=Device.CPU).precision is on_cpu


def test_a_flag_against_the_json_is_refused_before_accelerate_does() -> None:
    with pytest.raises(UsageError, match=r"bf16, but ds\.json has fp16"):
        with_json({**ZERO2, "fp16": ON}, mixed_precision=MixedPrecision.BF16)
    assert (
        with_json({**ZERO2, "fp16": AUTO}, mixed_precision=MixedPrecision.BF16).precision
        is Precision.BF16
    )


@pytest.mark.parametrize("strategy", [Strategy.NONE, Strategy.FSDP, Strategy.ZERO3])
def test_a_strategy_against_the_json_is_refused(strategy: Strategy) -> None:
    with pytest.raises(UsageError, match=r"ds\.json means zero2"):
        with_json(ZERO2, strategy=strategy)
    assert with_json(ZERO2, strategy=Strategy.ZERO2_OFFLOAD).strategy is Strategy.ZERO2


def both(yaml: str, **asked: Any) -> Plan:
    facts = slurm_facts(accelerate_config_text=yaml, deepspeed_config_text=json.dumps(ZERO2))
    files = {"accelerate_config": "acc.yaml", "deepspeed_config": "ds.json"}
    return on_slurm(facts, gpus_per_node=2, **files, **asked)


def test_both_files_go_together_where_they_do_not_contradict() -> None:
    plan = both("distributed_type: DEEPSPEED\nmixed_precision: bf16\n")
    assert plan.accelerate_text
    assert plan.deepspeed
    # accelerate raises for a precision in its file beside a JSON, and takes the same as a flag
    assert plan.precision is Precision.BF16


def test_what_accelerate_refuses_beside_a_json_is_refused_before_queueing() -> None:
    with pytest.raises(UsageError, match=r"acc\.yaml has zero_stage: accelerate refuses that"):
        both("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    with pytest.raises(UsageError, match="has distributed_type FSDP"):
        both("distributed_type: FSDP\n")


def test_a_json_alone_leaves_the_precision_to_a_flag() -> None:
    plan = with_json(ZERO2, mixed_precision=MixedPrecision.BF16)
    assert plan.accelerate["mixed_precision"] == ""
    assert plan.precision is Precision.BF16


def test_files_that_were_not_asked_for_are_not_read() -> None:
    facts = slurm_facts(accelerate_config_text="a: [1", deepspeed_config_text="{")
    assert lines(on_slurm(facts))["nodes"] == "1"
