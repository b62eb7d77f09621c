"""The user's own accelerate YAML and DeepSpeed JSON: taken as they are, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.choices import Device, GpuRequest, MixedPrecision, Strategy
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.inputs import named_json
from clusterrun.launch.plan import Plan, Precision
from clusterrun.launch.user_files import is_for_deepspeed
from tests.launch.samples import (
    ZERO2_OFFLOAD,
    here,
    lines,
    local_facts,
    on_slurm,
    slurm_facts,
    variables,
)


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


def test_the_yaml_decides_the_strategy() -> None:
    zero2 = "{zero_stage: 2, offload_optimizer_device: cpu}"
    expected = {
        "MULTI_GPU": "ddp",
        "FSDP": "fsdp",
        "FSDP\nfsdp_config: {fsdp_offload_params: true}": "fsdp-offload",
        "DEEPSPEED": "zero2",
        "DEEPSPEED\ndeepspeed_config: {zero_stage: 3}": "zero3",
        f"DEEPSPEED\ndeepspeed_config: {zero2}": "zero2-offload",
    }
    found = {text: with_yaml(f"distributed_type: {text}").strategy.value for text in expected}
    assert found == expected


def test_a_flag_beats_the_precision_of_the_yaml_and_auto_leaves_it() -> None:
    plan = with_yaml("distributed_type: NO\nmixed_precision: no\n", gpus_per_node=1)
    assert (plan.strategy, plan.precision) == (Strategy.NONE, Precision.NO)  # a bare no is false
    text = "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
    assert with_yaml(text).precision is Precision.FILE
    assert with_yaml(text, mixed_precision=MixedPrecision.BF16).precision is Precision.BF16


WRONG_YAMLS = {
    "a: [1": "is not valid YAML",
    "- a": "has no distributed_type",
    "num_processes: 2": "has no distributed_type",
    "distributed_type: MULTI_CPU": "MULTI_CPU cannot be launched",
    "distributed_type: NO\ncompute_environment: AMAZON_SAGEMAKER": "is not supported",
    "distributed_type: MEGATRON_LM": "MEGATRON_LM cannot be launched",
    "distributed_type: FSDP\nfsdp_config: [x]": r"fsdp_config must be a section .* \['x'\]",
    "distributed_type: FSDP\nparallelism_config: 3": "parallelism_config must be a section .* 3",
}
WRONG_JSONS = {
    "{": "is not valid JSON",
    "[]": "no zero_optimization section",
    '{"zero_optimization": 2}': "no zero_optimization section",
}


def test_an_unusable_file_is_named() -> None:
    for wrong, plan, file in ((WRONG_YAMLS, with_yaml, "acc.yaml"), (WRONG_JSONS, with_json, "ds")):
        for text, message in wrong.items():
            with pytest.raises(ConfigError, match=message) as refused:
                plan(text)
            assert (refused.value.where or "").startswith(file)


def test_a_json_is_taken_as_it_is_and_is_a_launch_of_deepspeed() -> None:
    text = '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},\n "x": "auto"}'
    plan = with_json(text)
    assert plan.deepspeed == text
    assert plan.accelerate_config == "deepspeed-config.yaml.j2"
    assert plan.strategy is Strategy.ZERO2_OFFLOAD


def test_the_json_decides_the_strategy() -> None:
    for zero, strategy in [
        ({"stage": 0}, Strategy.ZERO1),
        ({"stage": 1}, Strategy.ZERO1),
        ({"stage": "auto"}, Strategy.ZERO2),
        ({}, Strategy.ZERO1),
        ({"stage": 3}, Strategy.ZERO3),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, Strategy.ZERO3_OFFLOAD),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, Strategy.ZERO2),
    ]:
        assert with_json({"zero_optimization": zero}).strategy is strategy, zero


ON, OFF, AUTO = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}


def test_auto_precision_follows_the_json() -> None:
    head, no, bf16, fp16 = Precision.HEAD, Precision.NO, Precision.BF16, Precision.FP16
    cases: list[tuple[dict[str, Any], Precision, Precision | None]] = [
        ({}, head, no),
        ({"fp16": AUTO, "bf16": AUTO}, head, no),
        ({"bf16": AUTO}, head, no),
        ({"bf16": ON}, bf16, bf16),
        ({"bfloat16": ON}, bf16, bf16),
        ({"fp16": ON}, fp16, None),
        ({"fp16": OFF}, no, no),
        ({"fp16": OFF, "bf16": OFF}, no, no),
        ({"fp16": AUTO, "bf16": OFF}, fp16, no),
        ({"fp16": OFF, "bf16": AUTO}, bf16, no),
    ]
    for sections, on_gpu, on_cpu in cases:
        assert with_json({**ZERO2, **sections}).precision is on_gpu, sections
        if on_cpu is None:
            with pytest.raises(UsageError, match="fp16 needs a GPU"):
                with_json({**ZERO2, **sections}, device=Device.CPU)
        else:
            assert with_json({**ZERO2, **sections}, device=Device.CPU).precision is on_cpu


def test_a_flag_against_the_json_is_refused_before_accelerate_does() -> None:
    with pytest.raises(UsageError, match=r"'bf16', but ds\.json allows 'fp16'"):
        with_json({**ZERO2, "fp16": ON}, mixed_precision=MixedPrecision.BF16)
    assert (
        with_json({**ZERO2, "fp16": AUTO}, mixed_precision=MixedPrecision.BF16).precision
        is Precision.BF16
    )


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
    with pytest.raises(UsageError, match=r"acc\.yaml has zero_stage, which accelerate refuses"):
        both("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")


# What `accelerate config` writes for one machine, apart from the counts.
USUAL: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_process_ip": None,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
GPUS = ("0", "1", "2", "3")


def slurm(config: dict[str, Any], **asked: Any) -> Plan:
    facts = slurm_facts(accelerate_config_text=yaml.safe_dump({**USUAL, **config}))
    return on_slurm(facts, accelerate_config="acc.yaml", cpus_per_task=8, **asked)


def local(config: dict[str, Any], gpus: tuple[str, ...] = (), **asked: Any) -> Plan:
    facts = local_facts(accelerate_config_text=yaml.safe_dump({**USUAL, **config}), local_gpus=gpus)
    return here(facts, accelerate_config="acc.yaml", **asked)


def shape(plan: Plan) -> tuple[int, int, int]:
    return plan.nodes, plan.procs_per_node, plan.gpus_per_node


def counts(machines: int | None, processes: int | None) -> dict[str, Any]:
    return {"num_machines": machines, "num_processes": processes}


def test_the_file_says_nodes_ranks_and_gpus() -> None:
    plan = slurm(counts(2, 8))
    assert shape(plan) == (2, 4, 4)
    assert (lines(plan)["nodes"], lines(plan)["gpus-per-node"]) == ("2", "4")
    assert plan.notes == ()
    assert shape(local(counts(2, 4), GPUS)) == (2, 2, 2)
    assert shape(local(counts(2, 8), device=Device.CPU)) == (2, 4, 0)
    assert shape(local({"num_processes": 2})) == (1, 2, 0)
    every = slurm({"num_processes": 8}, nodes=2)  # without machines, those of all nodes
    assert (shape(every), every.notes) == ((2, 4, 4), ())
    assert shape(slurm({})) == (1, 1, 0)
    assert shape(slurm({}, nodes=2, gpus_per_node=4)) == (2, 4, 4)
    assert shape(slurm(counts(None, None), nproc_per_node=2)) == (1, 2, 0)
    assert shape(slurm({"distributed_type": "NO", **counts(1, 1)})) == (1, 1, 1)
    assert shape(slurm(counts(1, 1), nodes=2)) == (2, 1, 1)


@given(st.integers(1, 50), st.integers(1, 16), st.data())
def test_a_given_number_wins_and_a_note_names_both(
    machines: int, each: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.none() | st.integers(1, 50))
    ranks = data.draw(st.none() | st.integers(1, 16))
    gives = data.draw(st.sampled_from(("nproc_per_node", "gpus_per_node")))
    config = counts(machines, machines * each) | {"distributed_type": "FSDP"}
    plan = slurm(config, nodes=nodes, **{gives: ranks})
    assert shape(plan) == (nodes or machines, ranks or each, ranks or each)
    if (nodes or machines, ranks or each) == (machines, each):
        assert plan.notes == ()
    else:
        (note,) = plan.notes
        assert f"num_processes {machines * each} on {machines} machine" in note
        assert (f"{nodes} node" in note) is (nodes not in (None, machines))
        assert (f"{ranks} rank" in note) is (ranks not in (None, each))


def test_no_gpus_are_asked_for_on_cpus_or_where_they_are_already() -> None:
    by_file = local({**counts(1, 2), "use_cpu": True})
    assert (shape(by_file), variables(by_file)["ACCELERATE_USE_CPU"]) == ((1, 2, 0), "true")
    assert shape(slurm(counts(1, 2), device=Device.CPU)) == (1, 2, 0)
    assert shape(slurm(counts(1, 2), gpus_per_node=0)) == (1, 2, 0)
    plan = slurm(counts(1, 2), gpu_request=GpuRequest.NONE, sbatch_args=("--gres=gpu:2",))
    assert (shape(plan), "gpus-per-node" in lines(plan)) == ((1, 2, 2), False)


def test_counts_that_contradict_the_rest_of_the_file_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        (counts(2, 7), "num_processes 7 can't be divided evenly among 2 machines"),
        (counts(2, 1), "num_processes 1 can't be divided evenly among 2 machines"),
        (counts(1, 1), "distributed_type is MULTI_GPU, but num_processes is 1"),
        ({"distributed_type": "NO", **counts(1, 2)}, "none runs one process, but the job has 2"),
        ({"distributed_type": "FSDP", "use_cpu": True, **counts(1, 2)}, "fsdp needs GPUs"),
    ]
    for key in ("num_machines", "num_processes"):
        for value in ("2", "two", 2.0, True, False, 0, -1, [2], {"a": 2}):
            wrong.append(({key: value}, f"{key} must be a whole number above 0"))
    for config, message in wrong:
        for plan in (slurm, local):
            with pytest.raises((ConfigError, UsageError), match=message):
                plan(config)


def test_gpu_ids_choose_among_the_gpus_of_this_machine() -> None:
    plan = local({**counts(1, 2), "gpu_ids": "0,2"}, GPUS)
    assert (shape(plan), plan.gpu_ids, plan.notes) == ((1, 2, 2), ("0", "2"), ())
    plan = local({"distributed_type": "NO", **counts(1, 1), "gpu_ids": 3}, GPUS)
    assert plan.gpu_ids == ("3",)
    assert local({**counts(1, 2), "gpu_ids": "0,2"}, GPUS, gpu_ids="1,3").gpu_ids == ("1", "3")
    with pytest.raises(UsageError, match="GPU '5' is not available on this machine"):
        local({**counts(1, 2), "gpu_ids": "0,5"}, GPUS)


def test_what_clusterrun_replaces_is_named_in_one_note() -> None:
    machine = {
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "gpu_ids": "0,1",
    }
    says = "clusterrun replaces settings of acc.yaml: "
    assert slurm({**counts(2, 4), **machine}).notes == (
        f"{says}machine_rank 1, main_process_ip 10.0.0.1, main_process_port 29500, "
        "rdzv_backend c10d, gpu_ids 0,1",
    )
    assert slurm({**counts(2, 4), "main_process_port": 29500}, main_process_port=29500).notes == ()


def test_a_key_that_the_installed_accelerate_lacks_is_refused_with_the_nearest() -> None:
    facts = {"accelerate_config_text": "distributed_type: NO\nnum_machine: 2\nx: 1\n"}
    keys = frozenset(("distributed_type", "num_machines"))
    asked: dict[str, Any] = {"accelerate_config": "acc.yaml", "gpus_per_node": 1}
    assert on_slurm(slurm_facts(**facts), **asked).strategy is Strategy.NONE
    message = r"accelerate 1\.15\.0 has no key 'num_machine' or 'x'"
    with pytest.raises(ConfigError, match=message) as refused:
        on_slurm(slurm_facts(**facts, accelerate_keys=keys), **asked)
    assert refused.value.where == "acc.yaml"
    assert refused.value.hints == ("write num_machines for num_machine",)


# What the arguments of a script ask of the launch


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
        with pytest.raises(UsageError, match=r"but ds\.json selects zero2-offload") as refused:
            adopting(ZERO2_OFFLOAD, strategy=other)
        assert refused.value.hints == ("leave out --strategy: your own file decides",)


def test_a_file_of_the_launch_may_be_the_same_but_not_another() -> None:
    same = {
        "deepspeed_config": "own.json",
        "facts": {"deepspeed_config_text": json.dumps(ZERO2_OFFLOAD)},
    }
    plan = adopting(ZERO2_OFFLOAD, **same)
    assert plan.strategy is Strategy.ZERO2_OFFLOAD
    assert "sets the strategy" not in " ".join(plan.notes)  # the command line gave it
    other = {"deepspeed_config_text": '{"zero_optimization": {"stage": 3}}'}
    with pytest.raises(UsageError, match=r"^own\.json \(--deepspeed-config\) differs from"):
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
    wrong += [said(8, None, None, gradient_accumulation_steps=0)]
    assert [text.split(" (")[0] for text in wrong] == [
        *("64 is not 4", "36 is not a multiple of 4", "8 is not a multiple of 2"),
        "12 is not a multiple of 8 ranks",
        "ds.json: gradient_accumulation_steps must be above 0, not 0",
    ]
    right = [said(64, 4, 2), said(32, 4, None), said(16, "auto", 2), said(None, 3, 5)]
    assert {*right, said(16, 4, 1, args=tensor), said(4, 4, 1, sequence_parallel_size=8)} == {""}


def test_a_trainers_fsdp_is_left_to_it() -> None:
    args = ("--fsdp", "full_shard auto_wrap", "--fsdp_config", "f.json")
    plan = on_slurm(args=args, gpus_per_node=4)
    assert plan == on_slurm(args=args, gpus_per_node=4, strategy=Strategy.DDP)
