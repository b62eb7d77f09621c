"""The decisions of a plan: entry, name, strategy, precision; and that a plan is data."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterrun.launch
import clusterrun.rendering
from clusterrun.config.choices import Device, GpuRequest, MixedPrecision, Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from clusterrun.launch.facts import Facts
from clusterrun.launch.plan import Plan, Precision
from clusterrun.shared.own_modules import RUN_MODULE
from tests.launch.samples import here, lines, local_facts, on_slurm, slurm_facts


def test_the_entry_is_a_script_or_a_module_with_its_arguments() -> None:
    assert on_slurm(args=("--lr", "1e-4", "-m")).entry == ("train.py", "--lr", "1e-4", "-m")
    assert on_slurm(script=None, module="pkg.train", args=("x",)).entry == ("-m", "pkg.train", "x")
    assert on_slurm(script="-m").entry == ("./-m",)  # which looks like an option


def test_an_entry_that_cannot_run_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"script": None}, "no training script given"),
        ({"args": ("a\0b",)}, "NUL byte"),
        ({"setup": ("a\0b",)}, "NUL byte"),
    ]
    for asked, message in wrong:
        with pytest.raises(UsageError, match=message):
            on_slurm(**asked)


def test_the_name_is_readable_and_names_a_directory() -> None:
    names: list[tuple[dict[str, Any], str]] = [
        ({}, "train"),
        ({"script": "src/it's a \u00fcber;job$.py"}, "it_s_a_ber_job_"),
        ({"script": None, "module": "pkg.train"}, "pkg.train"),
        ({"script": ".."}, "job-.."),
        ({"script": "by-job.py"}, "job-by-job"),
        ({"name": "my job #1 100%"}, "my job #1 100%"),
    ]
    for asked, name in names:
        plan = on_slurm(**asked)
        assert (plan.name, lines(plan)["job-name"]) == (name, name)


def test_a_strategy_that_has_too_many_or_too_few_processes_is_refused() -> None:
    with pytest.raises(UsageError, match="none runs one process, but the job has 4") as refused:
        on_slurm(nodes=2, gpus_per_node=2, strategy=Strategy.NONE)
    assert "ddp" in refused.value.hints[0]
    assert on_slurm(gpus_per_node=1, strategy=Strategy.NONE).world_size == 1
    with pytest.raises(UsageError, match="each node has one rank"):
        on_slurm(nodes=4, gpus_per_node=1, strategy=Strategy.FSDP_HYBRID)


def test_fsdp_without_gpus_is_refused_with_the_reason() -> None:
    for strategy in (s for s in Strategy if s.is_fsdp):
        for plan in (here, on_slurm):
            with pytest.raises(UsageError, match="needs GPUs: on cpu") as refused:
                plan(nproc_per_node=2, strategy=strategy)
            assert "--gpus-per-node" in refused.value.hints[0]
            assert "zero2" in refused.value.hints[-1]


def test_deepspeed_runs_on_a_cpu_and_is_told_to_use_this_launcher() -> None:
    for strategy in (s for s in Strategy if s.is_deepspeed):
        assert here(nproc_per_node=2, strategy=strategy).device is Device.CPU
        with pytest.raises(UsageError, match="Apple GPUs"):
            here(local_facts(platform="darwin"), strategy=strategy)
        line = argv(on_slurm(nodes=2, gpus_per_node=1, strategy=strategy))
        assert line[line.index("--deepspeed_multinode_launcher") + 1] == "standard"
        assert "--deepspeed_config_file" not in line


def test_fsdp2_needs_torch_2_6() -> None:
    facts = slurm_facts(packages={"torch": "2.5.1"})
    with pytest.raises(UsageError, match=r"needs torch 2\.6 or newer; 2\.5\.1 is installed"):
        on_slurm(facts, gpus_per_node=2, strategy=Strategy.FSDP)


def test_precision_is_the_heads_on_gpus_and_none_on_a_cpu() -> None:
    fp16, bf16, no = MixedPrecision.FP16, MixedPrecision.BF16, MixedPrecision.NO
    cases: list[tuple[dict[str, Any], Precision]] = [
        ({"gpus_per_node": 1}, Precision.HEAD),
        ({}, Precision.NO),
        ({"mixed_precision": bf16}, Precision.BF16),
        ({"gpus_per_node": 1, "mixed_precision": fp16}, Precision.FP16),
        ({"gpus_per_node": 1, "mixed_precision": no}, Precision.NO),
    ]
    for asked, precision in cases:
        plan = on_slurm(**asked)
        decided = "" if precision is Precision.HEAD else precision.value
        assert (plan.precision, plan.accelerate["mixed_precision"]) == (precision, decided), asked


def test_one_gpu_a_node_is_still_one_world() -> None:
    cases: list[tuple[str, dict[str, Any], str, bool]] = [
        ("ddp", {"nodes": 2, "gpus_per_node": 1}, "MULTI_GPU", False),
        ("ddp", {"gpus_per_node": 1}, "NO", False),
        ("ddp", {"nodes": 2}, "MULTI_GPU", True),
        ("ddp", {}, "NO", True),
        ("none", {}, "NO", True),
        ("fsdp", {"gpus_per_node": 1}, "FSDP", False),
        ("zero2", {"nodes": 2}, "DEEPSPEED", False),
    ]
    for strategy, asked, kind, use_cpu in cases:
        values = on_slurm(strategy=Strategy(strategy), **asked).accelerate
        assert (values["distributed_type"], values["use_cpu"]) == (kind, use_cpu), strategy


HOSTILE = st.text(st.characters(exclude_characters="\0"), max_size=30)


@settings(deadline=None)
@given(args=st.lists(HOSTILE), value=HOSTILE, setup=st.lists(HOSTILE, max_size=2))
def test_a_plan_survives_its_file(args: list[str], value: str, setup: list[str]) -> None:
    plan = on_slurm(
        nodes=2, gpus_per_node=2, args=tuple(args), env={"A": value}, setup=tuple(setup)
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.to_json().isascii()


def test_planning_and_rendering_look_nothing_up() -> None:
    effects = {"os", "subprocess", "socket", "time", "datetime", "shutil", "platform", "sys"}
    for package in (clusterrun.launch, clusterrun.rendering):
        for module in Path(package.__path__[0]).glob("*.py"):
            imported = {
                (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
                for node in ast.walk(ast.parse(module.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert not {name.split(".")[0] for name in imported} & effects, module


def argv(plan: Plan, **changes: Any) -> tuple[str, ...]:
    where = NodeLaunch("/runs/r/accelerate.yaml", "", 1, "10.0.0.1", 23456, "bf16")
    return launch_argv(plan, where._replace(**changes), python="/usr/bin/python3")


def test_the_whole_line_of_a_node() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=4, args=("--lr", "1e-4"), rendezvous_timeout_s=900)
    options = (
        "--config_file /runs/r/accelerate.yaml --num_machines 2 --num_processes 8 --machine_rank 1 "
        "--main_process_ip 10.0.0.1 --main_process_port 23456 --rdzv_backend static "
        "--rdzv_conf timeout=900 --max_restarts 0 --monitor_interval 3 --gpu_ids all "
        "--mixed_precision bf16 --no_python /usr/bin/python3 -c"
    )
    worker = (RUN_MODULE, "clusterrun.rank.worker", "train.py", "--lr", "1e-4")
    assert argv(plan) == (*options.split(), *worker)


def test_the_flags_that_only_some_lines_have() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=1, strategy=Strategy.ZERO2)
    line = argv(plan, deepspeed_file="/runs/r/ds_config.json")
    assert line[line.index("--deepspeed_config_file") + 1] == "/runs/r/ds_config.json"
    for precision in ("", "file"):  # the file decides
        assert "--mixed_precision" not in argv(on_slurm(gpus_per_node=1), precision=precision)
    assert "--cpu" in argv(on_slurm(strategy=Strategy.NONE))  # it overwrites the environment
    assert "--cpu" not in argv(on_slurm(nodes=2))  # would make it N worlds


# Processes, device and GPUs: what is derived, and what is refused with a way out


TWO_GPUS = local_facts(local_gpus=("0", "1"))
FOUR_GPUS = local_facts(local_gpus=("4", "5", "6", "7"))


def test_gpus_of_a_node_are_its_ranks_unless_these_are_asked_for() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=4)
    assert (plan.procs_per_node, plan.world_size, plan.device) == (4, 8, Device.CUDA)
    plan = on_slurm(nodes=2, gpus_per_node=4, nproc_per_node=2)
    assert plan.world_size == 4
    assert "2 of the 4 GPUs of each node stay idle" in plan.notes
    plan = on_slurm(nodes=2, gpus_per_node=4, device=Device.CPU)
    assert (plan.world_size, plan.gpus_per_node, plan.device) == (8, 4, Device.CPU)
    assert on_slurm(device=Device.CUDA, gpu_request=GpuRequest.NONE).device is Device.CUDA


def test_without_a_gpu_the_same_ranks_run_on_the_cpu_and_that_is_said() -> None:
    """Whether none is here, or none is requested."""
    for where, plan in (
        ("requested", on_slurm(nodes=2, nproc_per_node=4)),
        ("here", here(nodes=2, gpus_per_node=4)),
    ):
        assert (plan.world_size, plan.device) == (8, Device.CPU)
        assert plan.notes == (f"no GPU {where}: 4 CPU ranks per node over gloo",)
    plan = here(TWO_GPUS, gpus_per_node=0, nproc_per_node=2)
    assert (plan.device, plan.world_size) == (Device.CPU, 2)


def test_here_each_gpu_has_a_rank_unless_some_are_chosen_in_their_order() -> None:
    for asked, each, gpu_ids in (
        ({}, 4, "4567"),
        ({"nodes": 2}, 2, "4567"),  # simulated nodes split them
        ({"gpu_ids": "7, 5"}, 2, "75"),
    ):
        plan = here(FOUR_GPUS, **asked)
        assert (plan.procs_per_node, plan.gpu_ids) == (each, tuple(gpu_ids))


ON_A_MAC = local_facts(platform="darwin")


def test_one_process_on_a_mac_uses_its_gpu() -> None:
    assert here(ON_A_MAC).device is Device.MPS
    assert here(ON_A_MAC, nproc_per_node=2).device is Device.CPU


IMPOSSIBLE: list[tuple[Facts | None, dict[str, Any], str]] = [
    (TWO_GPUS, {"nodes": 2, "gpus_per_node": 2}, "2 x 2 GPUs requested, but only 2 may be used"),
    (TWO_GPUS, {"nodes": 4}, "4 x 1 GPUs requested, but only 2 may be used here"),
    (TWO_GPUS, {"gpu_ids": "0,2"}, "GPU '2' is not available on this machine"),
    (TWO_GPUS, {"gpu_ids": "0,"}, "GPU '' is not available on this machine"),
    (TWO_GPUS, {"gpu_ids": "0,0"}, "names a GPU twice"),
    (TWO_GPUS, {"gpu_ids": "0", "device": Device.CPU}, "--device cpu uses none"),
    (TWO_GPUS, {"gpus_per_node": 1, "nproc_per_node": 2}, "2 ranks per node cannot share 1 GPU"),
    (local_facts(), {"device": Device.CUDA}, "1 x 1 GPUs requested, but only 0 may"),
    (local_facts(), {"device": Device.MPS}, "--device mps works only locally on a Mac"),
    (ON_A_MAC, {"device": Device.MPS, "nodes": 2}, "2 ranks cannot"),
    # On Slurm
    (None, {"gpus_per_node": 4, "nproc_per_node": 8}, "8 ranks per node cannot share 4 GPUs"),
    (None, {"device": Device.CUDA}, "no GPU is requested"),
    (None, {"device": Device.MPS}, "on a Mac"),
    (None, {"gpu_ids": "0,1"}, "--gpu-ids works only for a job on this machine"),
]


def test_impossible_worlds_are_refused() -> None:
    for facts, asked, message in IMPOSSIBLE:
        with pytest.raises(UsageError, match=message) as refused:
            here(facts, **asked) if facts else on_slurm(**asked)
        assert refused.value.exit_code == 2


def test_gpus_are_asked_for_once_and_counted() -> None:
    args = (
        "--gres=gpu:h100:4,--gres gpu:4,--gres=gpu,--gres=gpu:a100:2;shard:1,--gpus=16,"
        "--gres=nvme:1;gpu:1g.5gb:3,--gpus-per-node=h100:4,--tres-per-node=gres/gpu:4,-G h100:16,"
        "--gpus-per-task=1,--tres-per-task=cpu=4;gres/gpu:1,--gpus-per-socket=a100:2,"
        "--gres=shard:1,--tres-per-n=gres/gpu:4"
    )
    taken: dict[str, Any] = {"gpu_request": GpuRequest.NONE, "gpus_per_node": 2}
    for arg in args.split(","):
        option = arg.replace(";", ",")
        asked: list[dict[str, Any]] = [{}, {"gpus_per_node": 4}, {"gpu_request": GpuRequest.NONE}]
        for each in asked:
            with pytest.raises(UsageError, match="does not read the number from") as refused:
                on_slurm(nodes=2, sbatch_args=(option,), **each)
            assert "--gpus-per-node COUNT" in refused.value.hints[0]
        plan = on_slurm(nodes=2, sbatch_args=(option,), **taken)
        assert (plan.device, plan.procs_per_node) == (Device.CUDA, 2)
        assert " " not in plan.sbatch_args[0]
    with pytest.raises(UsageError, match="does not read the number from"):
        on_slurm(gpus_per_node=4, srun_args=("--gres=gpu:4",))
    with pytest.raises(UsageError, match="contains several options"):
        on_slurm(sbatch_args=("-p gpu -A nlp",))
