"""Our configurations before the installed accelerate: its parser takes them, its plugins read them.

Everything runs in this process: accelerate's own functions, and no launch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Device, MixedPrecision, Strategy
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from clusterrun.launch.plan import Plan, Precision
from clusterrun.rendering.bundle import render_bundle
from tests.launch.samples import on_slurm, slurm_facts, variables

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed"),
]

PRECISIONS = ("bf16", "fp16", "no")
SHARDED = {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
DOCUMENTED: dict[Strategy, dict[str, str]] = {
    Strategy.NONE: {},
    Strategy.DDP: {},
    Strategy.FSDP: {**SHARDED, "FSDP_OFFLOAD_PARAMS": "false"},
    Strategy.FSDP_OFFLOAD: {**SHARDED, "FSDP_OFFLOAD_PARAMS": "true"},
    Strategy.FSDP_HYBRID: {**SHARDED, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
    Strategy.ZERO1: {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    Strategy.ZERO2: {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    Strategy.ZERO3: {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    },
    Strategy.ZERO2_OFFLOAD: {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    },
    Strategy.ZERO3_OFFLOAD: {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
    },
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What accelerate made of a plan: its launcher, its arguments, and the ranks' environment."""

    launcher: str
    args: Any
    env: dict[str, str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_")):
            monkeypatch.delenv(name)


def launch(plan: Plan, directory: Path, *, rank: int = 0, precision: str = "") -> Launch:
    """Walk the way of `accelerate launch` up to the start of a process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    files = render_bundle(plan, resolved_yaml="").files
    for name, text in files.items():
        (directory / name).write_text(text)
    where = NodeLaunch(
        config_file=str(directory / "accelerate.yaml"),
        deepspeed_file=str(directory / "ds_config.json") if plan.deepspeed else "",
        machine_rank=rank,
        address="10.0.0.1",
        port=23456,
        precision=precision or plan.precision.value,
    )
    argv = launch_argv(plan, where, python=sys.executable)
    args, defaults, stated = _validate_launch_command(launch_command_parser().parse_args(argv))
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if stated else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    assert args.training_script == sys.executable
    assert tuple(args.training_script_args[3:]) == plan.entry
    return _launcher(args)


def _launcher(args: Any) -> Launch:
    from accelerate.utils import launch as ways

    if args.use_deepspeed and not args.cpu:
        command, env = ways.prepare_deepspeed_cmd_env(args)
        assert command is None, "DeepSpeed's own launcher would train each node alone"
        return Launch(launcher="deepspeed", args=args, env=env)
    if (args.use_fsdp or args.multi_gpu) and not args.cpu:
        return Launch(launcher="torchrun", args=args, env=ways.prepare_multi_gpu_env(args))
    _, env = ways.prepare_simple_launcher_cmd_env(args)
    return Launch(launcher="simple", args=args, env=env)


def gpu_plan(strategy: Strategy, nodes: int, precision: str, **asked: Any) -> Plan:
    gpus = 1 if strategy is Strategy.NONE else 2
    return on_slurm(
        strategy=strategy,
        nodes=nodes,
        gpus_per_node=gpus,
        mixed_precision=MixedPrecision(precision),
        args=("--lr", "1e-4", "-m", "--", "x y"),
        **asked,
    )


@pytest.mark.parametrize("strategy", Strategy)
def test_accelerate_takes_every_strategy_and_gives_the_documented_environment(
    strategy: Strategy, tmp_path: Path
) -> None:
    # none runs one process
    for nodes, precision in itertools.product(
        (1, 2)[: 1 + (strategy is not Strategy.NONE)], PRECISIONS
    ):
        found = launch(gpu_plan(strategy, nodes, precision), tmp_path, rank=nodes - 1)
        assert found.env["ACCELERATE_MIXED_PRECISION"] == precision
        assert DOCUMENTED[strategy].items() <= found.env.items()
        assert ("ACCELERATE_USE_FSDP" in found.env) is strategy.is_fsdp
        assert ("ACCELERATE_USE_DEEPSPEED" in found.env) is strategy.is_deepspeed
        kinds = {"deepspeed": strategy.is_deepspeed, "simple": strategy is Strategy.NONE}
        assert found.launcher == next((kind for kind, is_it in kinds.items() if is_it), "torchrun")
        if nodes == 2:
            assert (found.args.nnodes, found.args.nproc_per_node) == ("2", "2")
            assert (found.args.node_rank, found.args.rdzv_endpoint) == (1, "10.0.0.1:23456")


@pytest.mark.parametrize("strategy", [s for s in Strategy if s.is_fsdp])
def test_the_fsdp_plugin_reads_what_the_template_says(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    found = launch(gpu_plan(strategy, 2, "bf16"), tmp_path)
    for name, value in found.env.items():
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert "SHARDED" in str(plugin.state_dict_type)
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    assert offloads is (strategy is Strategy.FSDP_OFFLOAD)
    if strategy is Strategy.FSDP_HYBRID:
        mesh = ParallelismConfig()
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 2)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"strategy": Strategy.FSDP, "tensor_parallel": 2}, (1, 4, 1, 1, 2)),
        ({"strategy": Strategy.FSDP_HYBRID, "context_parallel": 2}, (2, 2, 2, 1, 1)),
        ({"strategy": Strategy.FSDP_OFFLOAD, "data_parallel_replicate": 4}, (4, 2, 1, 1, 1)),
        ({"strategy": Strategy.ZERO3, "sequence_parallel": 4}, (1, 2, 1, 4, 1)),
        ({"tensor_parallel": 8}, (1, 1, 1, 1, 8)),
    ],
)
def test_accelerates_parallelism_config_reads_the_sizes(
    asked: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    plan = on_slurm(nodes=2, gpus_per_node=4, mixed_precision=MixedPrecision.BF16, **asked)
    found = launch(plan, tmp_path)
    assert found.env["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    for name, value in found.env.items():
        if name.startswith("PARALLELISM_CONFIG_"):
            monkeypatch.setenv(name, value)
    mesh = ParallelismConfig()
    names = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")
    assert tuple(getattr(mesh, name) for name in names) == sizes
    assert mesh.total_size == plan.world_size
    assert mesh.data_parallel_size == plan.data_parallel


def test_a_deepspeed_json_of_the_users_own_goes_with_sequence_parallel(tmp_path: Path) -> None:
    facts = slurm_facts(deepspeed_config_text=json.dumps(OWN_JSON))
    asked = {"deepspeed_config": "ds.json", "sequence_parallel": 2}
    found = launch(on_slurm(facts, nodes=2, gpus_per_node=2, **asked), tmp_path, precision="bf16")
    assert found.launcher == "deepspeed"
    assert found.env["PARALLELISM_CONFIG_SP_SIZE"] == "2"


@pytest.mark.parametrize("strategy", [s for s in Strategy if s.is_deepspeed])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_deepspeed_plugin_reads_what_the_template_says(
    strategy: Strategy, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deepspeed_config(gpu_plan(strategy, 2, precision), tmp_path, monkeypatch, precision)
    zero = config["zero_optimization"]
    assert zero["stage"] == int(strategy.value[4])
    offload = "cpu" if strategy.value.endswith("offload") else "none"
    assert zero["offload_optimizer"]["device"] == offload
    assert zero["offload_param"]["device"] == (offload if zero["stage"] == 3 else "none")
    assert config["bf16"]["enabled"] is (precision == "bf16")
    assert config["fp16"]["enabled"] is (precision == "fp16")
    # the script says how often it accumulates
    assert config["gradient_accumulation_steps"] == "auto"


def deepspeed_config(
    plan: Plan, directory: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> dict[str, Any]:
    """Let accelerate's DeepSpeed plugin read the environment of a rank, as Accelerator() does."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from accelerate.utils import DeepSpeedPlugin

    for name, value in launch(plan, directory, precision=precision).env.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    return dict(plugin.deepspeed_config)


OWN_JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize("own_yaml", ["", "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"])
def test_the_users_json_reaches_deepspeed_with_the_published_precision(
    own_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = slurm_facts(deepspeed_config_text=json.dumps(OWN_JSON), accelerate_config_text=own_yaml)
    files = {"deepspeed_config": "ds.json", "accelerate_config": "a.yaml" if own_yaml else None}
    plan = on_slurm(facts, nodes=2, gpus_per_node=2, **files)
    config = deepspeed_config(plan, tmp_path, monkeypatch, "bf16")
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["bf16"] == {"enabled": True}
    assert os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(tmp_path / "ds_config.json")


def test_only_the_machine_facts_of_a_users_yaml_are_replaced(tmp_path: Path) -> None:
    text = (
        "distributed_type: MULTI_GPU\nnum_machines: 7\nnum_processes: 56\nmachine_rank: 3\n"
        "main_process_ip: elsewhere\nmain_process_port: 1\ngpu_ids: '0,1'\n"
        "mixed_precision: 'no'\nrdzv_backend: c10d\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    )
    facts = slurm_facts(accelerate_config_text=text)
    plan = on_slurm(facts, nodes=2, gpus_per_node=1, accelerate_config="a.yaml")
    found = launch(plan, tmp_path, rank=1)
    assert (found.args.num_machines, found.args.num_processes) == (2, 2)
    assert (found.args.node_rank, found.args.rdzv_endpoint) == (1, "10.0.0.1:23456")
    assert (found.args.rdzv_backend, found.args.max_restarts) == ("static", 0)
    assert found.env["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert found.env["ACCELERATE_MIXED_PRECISION"] == "no"
    # P38: ids of a file would override what the scheduler allocated
    assert found.env.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("strategy", "nodes", "launcher"),
    [
        (Strategy.NONE, 1, "simple"),
        (Strategy.DDP, 1, "simple"),
        (Strategy.DDP, 2, "torchrun"),
        (Strategy.ZERO2, 2, "deepspeed"),
    ],
)
def test_the_forms_for_a_cpu(
    strategy: Strategy, nodes: int, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = on_slurm(nodes=nodes, device=Device.CPU, strategy=strategy)
    for name, value in variables(plan).items():
        monkeypatch.setenv(name, value)
    found = launch(plan, tmp_path, rank=nodes - 1)
    assert found.launcher == launcher
    wants_cpu = found.env.get("ACCELERATE_USE_CPU", "false").lower()
    assert wants_cpu == ("false" if strategy.is_deepspeed else "true")
    assert found.env["OMP_NUM_THREADS"] == "1"


def test_a_precision_that_the_users_yaml_decides_is_left_to_it(tmp_path: Path) -> None:
    facts = slurm_facts(accelerate_config_text="distributed_type: FSDP\nmixed_precision: bf16\n")
    plan = on_slurm(facts, nodes=2, gpus_per_node=2, accelerate_config="a.yaml")
    assert plan.precision is Precision.FILE
    assert launch(plan, tmp_path).env["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_a_default_config_of_the_user_has_no_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands import launch as module

    leftover = tmp_path / "default_config.yaml"
    leftover.write_text("distributed_type: DEEPSPEED\nmain_process_port: 1\nnum_processes: 9\n")
    monkeypatch.setattr(module, "default_config_file", str(leftover))
    found = launch(gpu_plan(Strategy.DDP, 2, "bf16"), tmp_path)
    assert (found.launcher, found.args.num_processes) == ("torchrun", 4)
