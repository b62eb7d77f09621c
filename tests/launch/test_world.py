"""Processes, device and GPUs: what is derived, and what is refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.choices import Device, GpuRequest
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from tests.launch.samples import here, local_facts, on_slurm

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


def test_no_gpus_on_slurm_means_cpu_and_says_so() -> None:
    plan = on_slurm(nodes=2, nproc_per_node=4)
    assert plan.device is Device.CPU
    assert plan.notes == ("no GPU requested: 4 CPU processes per node over gloo",)


def test_here_without_a_gpu_the_same_ranks_run_on_the_cpu() -> None:
    plan = here(nodes=2, gpus_per_node=4)
    assert (plan.world_size, plan.device) == (8, Device.CPU)
    assert plan.notes == ("no GPU here: 4 CPU processes per node over gloo",)


def test_here_the_default_is_a_rank_for_each_gpu() -> None:
    plan = here(FOUR_GPUS)
    assert (plan.world_size, plan.gpu_ids) == (4, ("4", "5", "6", "7"))


def test_simulated_nodes_split_the_gpus_of_this_machine() -> None:
    plan = here(FOUR_GPUS, nodes=2)
    assert (plan.procs_per_node, plan.gpu_ids) == (2, ("4", "5", "6", "7"))


def test_gpu_ids_choose_among_the_visible_ones_in_the_order_given() -> None:
    plan = here(FOUR_GPUS, gpu_ids="7, 5")
    assert (plan.world_size, plan.gpu_ids) == (2, ("7", "5"))


def test_one_process_on_a_mac_uses_its_gpu() -> None:
    assert here(local_facts(platform="darwin")).device is Device.MPS
    assert here(local_facts(platform="darwin"), nproc_per_node=2).device is Device.CPU


def test_zero_gpus_here_means_cpu_even_where_there_are_some() -> None:
    plan = here(TWO_GPUS, gpus_per_node=0, nproc_per_node=2)
    assert (plan.device, plan.world_size) == (Device.CPU, 2)


ON_A_MAC = local_facts(platform="darwin")
IMPOSSIBLE: list[tuple[Facts | None, dict[str, Any], str]] = [
    (TWO_GPUS, {"nodes": 2, "gpus_per_node": 2}, "2 x 2 GPUs requested, but only 2 may be used"),
    (TWO_GPUS, {"nodes": 4}, "4 x 1 GPUs requested, but only 2 may be used here"),
    (TWO_GPUS, {"gpu_ids": "0,2"}, "GPU 2 is not on this machine"),
    (TWO_GPUS, {"gpu_ids": "0,0"}, "not a list of distinct GPUs"),
    (TWO_GPUS, {"gpu_ids": "0,"}, "not a list of distinct GPUs"),
    (TWO_GPUS, {"gpu_ids": "0", "device": Device.CPU}, "--device cpu uses none"),
    (TWO_GPUS, {"gpus_per_node": 1, "nproc_per_node": 2}, "2 ranks of a node cannot share 1 GPU"),
    (local_facts(), {"device": Device.CUDA}, "this machine has no usable GPU"),
    (local_facts(), {"device": Device.MPS}, "this machine runs linux"),
    (ON_A_MAC, {"device": Device.MPS, "nodes": 2}, "2 ranks cannot"),
    # On Slurm
    (None, {"gpus_per_node": 4, "nproc_per_node": 8}, "8 ranks of a node cannot share 4 GPUs"),
    (None, {"device": Device.CUDA}, "no GPU is requested"),
    (None, {"device": Device.MPS}, "Apple's GPU"),
    (None, {"gpu_ids": "0,1"}, "the GPUs of this machine"),
]


def test_impossible_worlds_are_refused() -> None:
    for facts, asked, message in IMPOSSIBLE:
        with pytest.raises(UsageError, match=message) as refused:
            here(facts, **asked) if facts else on_slurm(**asked)
        assert refused.value.exit_code == 2


def test_gpus_are_asked_for_once_and_counted() -> None:
    args = (
        "--gres=gpu:h100:4,--gres gpu:4,--gres=gpu,--gre=gpu:2,--gres=gpu:a100:2;shard:1,--gpus=16,"
        "--gres=nvme:1;gpu:1g.5gb:3,--gpus-per-node=h100:4,--tres-per-node=gres/gpu:4,-G h100:16,"
        "--gpu=4,--gpus-per-task=1,--tres-per-task=cpu=4;gres/gpu:1,--gpus-per-socket=a100:2,"
        "--gres=shard:1"
    )
    taken: dict[str, Any] = {"gpu_request": GpuRequest.NONE, "gpus_per_node": 2}
    for arg in args.split(","):
        option = arg.replace(";", ",")
        asked: list[dict[str, Any]] = [{}, {"gpus_per_node": 4}, {"gpu_request": GpuRequest.NONE}]
        for each in asked:
            with pytest.raises(UsageError, match="requests GPUs beside clusterrun") as refused:
                on_slurm(nodes=2, sbatch_args=(option,), **each)
            assert "--gpus-per-node COUNT" in refused.value.hints[0]
        plan = on_slurm(nodes=2, sbatch_args=(option,), **taken)
        assert (plan.device, plan.procs_per_node) == (Device.CUDA, 2)
        assert " " not in plan.sbatch_args[0]
    with pytest.raises(UsageError, match="requests GPUs beside clusterrun"):
        on_slurm(gpus_per_node=4, srun_args=("--gres=gpu:4",))
    with pytest.raises(UsageError, match="contains several options"):
        on_slurm(sbatch_args=("-p gpu -A nlp",))
